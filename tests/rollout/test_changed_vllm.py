"""Real engines on another vLLM than Keel was written for: they do without, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollout.remote_engine import OPEN, engine_spec, prompts, running_engine
from tests.rollout.weight_loading.updates import (
    BLOCKS,
    CACHE_GIB,
    change,
    check_probabilities,
    make,
)

pytestmark = pytest.mark.e2e
DEFERRED = "vllm.model_executor.layers.attention:is_deferred_attention_layer"
CONFIGS = "vllm.v1.engine.core:get_kv_cache_configs"
PREPARE = "vllm.v1.engine.core:EngineCore.preprocess_add_request"


def test_updates_turns_and_the_size_of_the_cache_as_vllm_has_them(
    tmp_path: Path,
) -> None:
    model = make(tmp_path, "experts")
    spec = engine_spec(tmp_path, sampling=OPEN, kv_cache_gib=CACHE_GIB / 8)
    changes = [(DEFERRED, "renamed"), *((it, "another signature") for it in (CONFIGS, PREPARE))]
    with running_engine(spec, gpu=False, kind="plain", changes=changes) as engine:
        said = engine.warnings()
        assert len(said) == 3
        for where, knob in (
            (CONFIGS, "rollout.gpu_memory_utilization"),
            (DEFERRED, "rollout.copy_weights"),
            (PREPARE, "Turns of conversations begin as all requests of vLLM do"),
        ):
            assert any(where in line and knob in line for line in said), where
        assert engine.blocks() > BLOCKS[1]  # what another engine is bounded to
        for version in (1, 2):
            engine.update(version, change(model, version))
            groups = engine.sample(prompts(3, shared=30, own=9, tag=f"u{version}"), group_size=2)
            check_probabilities(model, groups, version)
        assert DEFERRED in engine.updates()[0]


def test_what_cannot_be_recorded_is_an_error_before_the_engine_starts(tmp_path: Path) -> None:
    make(tmp_path, "experts")
    changes = [("vllm.v1.worker.block_table:BlockTable.get_numpy_array", "renamed")]
    with (
        pytest.raises(RuntimeError, match=r"has changed: .*BlockTable has no get_numpy_array"),
        running_engine(engine_spec(tmp_path), gpu=False, changes=changes),
    ):
        pass
