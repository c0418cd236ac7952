"""Checks which steps are reused. This module imports vLLM."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR
from vllm.v1.worker.gpu.model_runner import ExecuteModelState
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from keel.rollout.vllm_fast import step_reuse
from keel.rollout.vllm_fast.step_reuse import StepReuse, covers

IDS = ["a", "b", "c"]
EACH = dict.fromkeys(IDS, 1)
FULL = SimpleNamespace(cg_mode=CUDAGraphMode.FULL, num_tokens=4)


def output(**changes: Any) -> SchedulerOutput:
    made = SchedulerOutput.make_empty()
    made.num_scheduled_tokens = EACH
    made.scheduled_cached_reqs = CachedRequestData(
        req_ids=IDS,
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None, ([7],), None],
        num_computed_tokens=[10, 11, 12],
        num_output_tokens=[1, 1, 1],
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def batch(**changes: Any) -> Any:
    usual = {
        "req_ids": list(IDS),
        "num_reqs": 3,
        "num_tokens": 3,
        "num_reqs_after_padding": 4,
        "num_tokens_after_padding": 4,
        "num_draft_tokens": 0,
        "has_prefill": False,
        "idx_mapping": torch.tensor([5, 2, 4]),
        "idx_mapping_np": np.array([5, 2, 4]),
        "query_start_loc": torch.arange(4),
        "seq_lens_cpu_upper_bound": torch.tensor([11, 12, 13, 0], dtype=torch.int32),
    }
    return SimpleNamespace(**usual | changes)


class Runner:
    """Model runner with the fields that `StepReuse` reads."""

    def __init__(self) -> None:
        parallel = SimpleNamespace(world_size=1, data_parallel_size=1, enable_eplb=False)
        state: Any = object.__new__(DefaultModelState)
        state.rope_state = state.prompt_embeds_state = None
        state.prepare_attn = lambda *given: self.done.append("attention") or {"layer": given}
        spec: Any = object.__new__(FullAttentionSpec)
        self.done: list[Any] = []
        self.batch = batch()
        self.metadata: dict[str, Any] = {"layer": SimpleNamespace(step=1)}
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]
        )
        self.cudagraph_manager: Any = SimpleNamespace(
            dispatch=lambda *_, **__: FULL,
            run_fullgraph=lambda graph: self.done.append("model") or torch.zeros(4, 2),
        )
        self.model_state, self.kv_connector = state, NO_OP_KV_CONNECTOR
        self.dcp_size, self.num_speculative_steps, self.lora_config = 1, 0, None
        self.pcp_manager = self.ubatch_runner = self.fast_prefill = None
        self.pooling_runner = self.encoder_cache = self.aux_output_connector = None
        self.uses_inputs_embeds = self.is_encoder_decoder = False
        self.observability_config = SimpleNamespace(cudagraph_metrics=False)
        self.model_config = SimpleNamespace(rswa_window=None)
        self.sampler = SimpleNamespace(apply_staged_writes=lambda: self.done.append("sampler"))
        self.attn_groups: list[Any] = []
        self.req_states = SimpleNamespace(
            num_computed_tokens=SimpleNamespace(gpu=None),
            last_sampled_tokens=None,
            num_computed_tokens_np=np.zeros(8, np.int32),
        )
        self.input_buffers = SimpleNamespace(positions=None, seq_lens=None, input_ids=None)
        note = self.done.append
        self.block_tables = SimpleNamespace(
            append_block_ids=lambda request, blocks, overwrite: note((request, blocks, overwrite)),
            apply_staged_writes=lambda: note("tables"),
            gather_block_tables=lambda rows, num_reqs_padded: note(("gathered", num_reqs_padded)),
            block_tables=[SimpleNamespace(gpu=None)],
            input_block_tables=[torch.zeros(8, 2)],
            block_sizes=[16],
            slot_mappings=torch.zeros(1, 8),
        )
        self.execute_model_state: Any = None

    def execute_model(self, asked: SchedulerOutput, *_: Any, **__: Any) -> Any:
        self.done.append("vllm")
        self.execute_model_state = ExecuteModelState(
            input_batch=self.batch,
            attn_metadata=self.metadata,
            slot_mappings_by_layer=None,
            hidden_states=torch.ones(4, 2),
            aux_hidden_states=None,
            dp_sync_state=None,
            finished_req_ids=asked.finished_req_ids,
            ec_connector_output=None,
            cudagraph_stats=None,
            num_spec_tokens_to_schedule=0,
        )


def steps(patch: pytest.MonkeyPatch) -> tuple[Runner, StepReuse]:
    runner = Runner()
    patch.setattr(step_reuse, "advance", lambda *_, **__: runner.done.append("advance"))
    return runner, StepReuse(runner)


def steps_with_other_work_are_not_reused(patch: pytest.MonkeyPatch) -> None:
    """The check covers every field of `SchedulerOutput`."""
    usual = output()
    others: dict[str, Any] = {
        "num_scheduled_tokens": dict(EACH),
        "scheduled_cached_reqs": CachedRequestData.make_empty(),
        "scheduled_new_reqs": [1],
        "finished_req_ids": {"z"},
        "preempted_req_ids": {"z"},
        "free_encoder_mm_hashes": ["z"],
        "new_block_ids_to_zero": [3],
        "kv_cache_block_copies": [3],
        "has_structured_output_requests": True,
    }
    without_effect = {
        "total_num_scheduled_tokens",  # follows from the rows
        "scheduled_spec_decode_tokens",  # no speculation, see `covers`
        "num_spec_tokens_to_schedule",
        "num_invalid_spec_tokens",
        "scheduled_encoder_inputs",  # no encoder
        "scheduled_encoder_input_stats",
        "ec_connector_metadata",
        "ec_manager_metadata",
        "kv_connector_metadata",  # no connector
        "kv_connector_block_state",
        "has_sync_kv_loads",
        "aux_output_connector_metadata",  # passed through
        "pending_structured_output_tokens",  # as above
        "num_common_prefix_blocks",  # deprecated
    }
    known = {field.name for field in fields(SchedulerOutput)}
    assert known - others.keys() - without_effect == set()
    for name, value in others.items():
        runner, taken = steps(patch)
        taken.execute_model(output())
        taken.execute_model(usual)
        assert taken.reused == 1
        taken.execute_model(output(**{name: value}))
        assert taken.reused == 1, name
        assert runner.done.count("vllm") == 2


def uncovered_models_keep_vllms_steps(_: pytest.MonkeyPatch) -> None:
    plain: Any = Runner()
    assert covers(plain)
    for changes in (
        {"cudagraph_manager": None},
        {"model_state": SimpleNamespace(rope_state=None, prompt_embeds_state=None)},
        {"kv_connector": object()},
        {"dcp_size": 2},
        {"pcp_manager": 1},
        {"ubatch_runner": 1},
        {"fast_prefill": 1},
        {"pooling_runner": 1},
        {"encoder_cache": 1},
        {"lora_config": 1},
        {"num_speculative_steps": 1},
        {"uses_inputs_embeds": True},
        {"is_encoder_decoder": True},
        {"observability_config": SimpleNamespace(cudagraph_metrics=True)},
        {"model_config": SimpleNamespace(rswa_window=8)},
        {"kv_cache_config": SimpleNamespace(kv_cache_groups=[])},
    ):
        runner: Any = Runner()
        vars(runner).update(changes)
        assert not covers(runner), changes
    for name in ("rope_state", "prompt_embeds_state"):
        runner = Runner()
        setattr(runner.model_state, name, 1)
        assert not covers(runner), name
    for name in ("world_size", "data_parallel_size", "enable_eplb"):
        runner = Runner()
        setattr(runner.vllm_config.parallel_config, name, 2)
        assert not covers(runner), name
    other: Any = Runner()
    other.kv_cache_config.kv_cache_groups[0].kv_cache_spec = object()
    assert not covers(other)


def known_steps_are_reused(patch: pytest.MonkeyPatch) -> None:
    runner, taken = steps(patch)
    taken.execute_model(output())
    first = runner.execute_model_state
    taken.execute_model(output())
    second = runner.execute_model_state
    new_block = [(2, ([7],), False)]  # of the second row
    tables = ["tables", ("gathered", 4)]
    assert runner.done == ["vllm", *new_block, *tables, "sampler", "advance", "model"]
    assert runner.req_states.num_computed_tokens_np.tolist() == [0, 0, 11, 0, 12, 10, 0, 0]
    made = second.input_batch
    assert made is not first.input_batch and made.idx_mapping is first.input_batch.idx_mapping
    assert made.num_computed_tokens_np.tolist() == [10, 11, 12]
    assert made.seq_lens_cpu_upper_bound.tolist() == [11, 12, 13, 0]
    assert second.hidden_states is not first.hidden_states
    runner.metadata = {"layer": SimpleNamespace(step=None)}  # not reusable
    taken.execute_model(output(finished_req_ids={"z"}))
    taken.execute_model(output())
    assert runner.done[-3:] == ["advance", "attention", "model"]
    assert runner.execute_model_state.finished_req_ids == set()
    assert runner.execute_model_state.attn_metadata is not runner.metadata
    assert taken.reused == 2


def only_graph_decode_steps_are_reused(patch: pytest.MonkeyPatch) -> None:
    for changes in (
        {"has_prefill": True},
        {"num_draft_tokens": 1},
        {"num_tokens": 5},
        {"req_ids": ["b", "a", "c"]},
        {"num_tokens_after_padding": 3},
    ):
        runner, taken = steps(patch)
        runner.batch = batch(**changes)
        for _ in range(2):
            taken.execute_model(output())
        assert runner.done == ["vllm", "vllm"], changes
    runner, taken = steps(patch)
    taken.execute_model(output())
    taken.execute_model(SchedulerOutput.make_empty(), dummy_run=True)
    taken.execute_model(output())
    assert runner.done == ["vllm"] * 3
    runner, taken = steps(patch)
    eager = SimpleNamespace(cg_mode=CUDAGraphMode.NONE, num_tokens=4)
    runner.cudagraph_manager.dispatch = lambda *_, **__: eager
    for _ in range(2):
        taken.execute_model(output())
    assert runner.done == ["vllm", "vllm"]


def failed_steps_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    runner, taken = steps(patch)
    taken.execute_model(output())

    def fail(_: Any) -> None:
        raise RuntimeError("out of memory")

    works, runner.cudagraph_manager.run_fullgraph = runner.cudagraph_manager.run_fullgraph, fail
    with pytest.raises(RuntimeError, match="out of memory"):
        taken.execute_model(output())
    runner.cudagraph_manager.run_fullgraph = works
    taken.execute_model(output())
    assert runner.done[-1] == "vllm"
