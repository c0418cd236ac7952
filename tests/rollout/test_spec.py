"""Tests the engine options that depend on GPUs."""

from __future__ import annotations

from dataclasses import replace

from keel.configs.schema import Config, DataConfig, RolloutConfig, RunConfig, SourceConfig
from keel.model.batch_invariant import VARIABLE
from keel.rollout.spec import EngineSpec, environment


def test_engine_memory_share() -> None:
    """With `run.gpu_gib`, a larger GPU must not give the engine more memory."""
    source = SourceConfig(name="q", source="jsonl", path="q.jsonl", rewards={"correct": 1.0})
    config = Config(
        run=RunConfig(gpu_gib=40.0),
        data=DataConfig(sources=(source,)),
        rollout=RolloutConfig(gpu_memory_utilization=0.5),
    )
    assert EngineSpec.of(config, "model").gpu_share(160.0) == 0.125
    assert EngineSpec.of(config, "model").gpu_share(32.0) == 0.5
    whole = replace(config, run=RunConfig())
    assert EngineSpec.of(whole, "model").gpu_share(160.0) == 0.5


def test_batch_invariance_is_set_before_import() -> None:
    """The variable must be set only on GPUs, and only if batch invariance is on."""
    for gpu in (False, True):
        for on in (False, True):
            variables = environment(RolloutConfig(), gpu=gpu, batch_invariant=on)
            assert (VARIABLE in variables) == (gpu and on)
