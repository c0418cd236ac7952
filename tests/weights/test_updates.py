"""Updates by copies in real engines with unpacked weights, as on a GPU. On a CPU, vLLM packs
weights and its loader does every update."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.rollout.remote_engine import OPEN, engine_spec, prompts, running_engine
from tests.weights.updates import (
    Model,
    change,
    check,
    check_probabilities,
    make,
    make_old,
)

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("of", ["experts", "dense", "latent"])
def test_updates_by_copies(tmp_path: Path, of: Model) -> None:
    check(tmp_path, of, sleeps=False, gpu=False, kind="plain")


def test_packed_tied_head_follows_its_embedding(tmp_path: Path) -> None:
    """The loader handles packed weights."""
    model = make(tmp_path, "dense")
    with running_engine(engine_spec(tmp_path, sampling=OPEN), gpu=False) as engine:
        for version in (1, 2):
            engine.update(version, change(model, version))
            (why,) = engine.updates()
            assert "reads a loaded tensor" in why
            groups = engine.sample(prompts(2, shared=30, own=9), group_size=2)
            check_probabilities(model, groups, version)


@pytest.mark.parametrize("of", ["gpt_neox", "gpt2"])
def test_hub_checkpoints_with_extra_tensors(
    tmp_path: Path, of: Literal["gpt_neox", "gpt2"]
) -> None:
    """Some tensors are never loaded, and the decoder prefix is missing."""
    model = make_old(tmp_path, of)
    with running_engine(engine_spec(tmp_path, sampling=OPEN), gpu=False) as engine:
        engine.update(1, change(model, 1))
        check_probabilities(model, engine.sample(prompts(2, shared=30, own=9)), 1)
