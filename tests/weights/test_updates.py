"""Updates by copies in real engines with unpacked weights, as on a GPU. On a CPU, vLLM packs
weights and its loader does every update."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollout.remote_engine import OPEN, engine_spec, prompts, running_engine
from tests.weights.updates import Model, change, check, check_probabilities, make

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(("of", "amx"), [("experts", None), ("latent", True)])
def test_updates_by_copies(tmp_path: Path, of: Model, amx: bool | None) -> None:
    check(tmp_path, of, sleeps=False, gpu=False, kind="plain", amx=amx)


@pytest.mark.parametrize("of", ["dense", "gpt2"])
def test_updates_by_the_loader(tmp_path: Path, of: Model) -> None:
    """The dense model has a packed head that is tied to the embedding. GPT-2's checkpoint has
    masks that are never loaded, and lacks the decoder prefix."""
    model = make(tmp_path, of)
    with running_engine(engine_spec(tmp_path, sampling=OPEN), gpu=False) as engine:
        for version in (1, 2):
            engine.update(version, change(model, version))
            assert engine.updates() != ["copies"]
            groups = engine.sample(prompts(2, shared=30, own=9), group_size=2)
            check_probabilities(model, groups, version)
