"""Weight updates of real engines. On a CPU, vLLM packs weights and its loader does every update;
tests/gpu/test_recorders_native.py covers updates by copies."""

from pathlib import Path

import pytest
import torch

from keel.model.load import load_policy
from tests.model.quantised import quantise
from tests.rollout.remote_engine import OPEN, engine_spec, prompts, running_engine
from tests.weights.updates import Model, change, check_probabilities, make

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("of", ["dense", "gpt2"])
def test_updates_by_the_loader(tmp_path: Path, of: Model) -> None:
    """The dense model has a packed head that is tied to the embedding. GPT-2's checkpoint has
    masks that are never loaded, and lacks the decoder prefix."""
    model = make(tmp_path, of)
    spec = engine_spec(tmp_path, sampling=OPEN, kv_cache_gib=0.25)
    with running_engine(spec, gpu=False) as engine:
        for version in (1, 2):
            engine.update(version, change(model, version))
            assert engine.updates() != ["copies"]
            groups = engine.sample(prompts(2, shared=30, own=9), group_size=2)
            check_probabilities(model, groups, version)


def test_an_engine_starts_from_dequantised_weights(tmp_path: Path) -> None:
    make(tmp_path, "latent")
    quantise(tmp_path, (128, 128))
    model = load_policy(str(tmp_path), torch.float32).eval()
    spec = engine_spec(tmp_path, sampling=OPEN, kv_cache_gib=0.25)
    with running_engine(spec, gpu=False, amx=True) as engine:
        for version in (0, 1, 2):
            if version:
                engine.update(version, change(model, version))
                assert engine.updates() != ["copies"]
            groups = engine.sample(prompts(2, shared=30, own=9), group_size=2)
            check_probabilities(model, groups, version)
