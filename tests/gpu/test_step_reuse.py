"""Steps prepared by one kernel against steps prepared by vLLM.

Runs on a GPU or under Triton's interpreter (TRITON_INTERPRET=1). The recorder tests cover whole
steps of a model.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keel.configs.schema import SamplingConfig
from keel.rl.types import Trajectory
from tests.gpu.marks import DEVICE, INTERPRETED, KERNELS
from tests.rollout.remote_engine import engine_spec, prompts, running_engine
from tests.rollout.tiny_model import make_model

# The functions load vLLM, which stays out of a run that skips them.
# ruff: noqa: PLC0415
pytestmark = KERNELS
REQUESTS, PAGE, BLOCKS, MOST = 300, 16, 9, 400


class Fields:
    """vLLM's request state and input buffers."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        number = lambda most, *shape: torch.randint(0, most, shape, generator=draw)  # noqa: E731
        self.computed = number(PAGE * BLOCKS - 1, REQUESTS).int().to(DEVICE)
        self.sampled = number(50_000, REQUESTS, 1).to(DEVICE)
        self.table = number(10_000, REQUESTS, BLOCKS).int().to(DEVICE)
        self.positions = torch.full((MOST,), -7, dtype=torch.int64, device=DEVICE)
        self.lengths = torch.full((MOST,), -7, dtype=torch.int32, device=DEVICE)
        self.ids = torch.full((MOST,), -7, dtype=torch.int32, device=DEVICE)
        self.slots = torch.full((MOST,), -7, dtype=torch.int64, device=DEVICE)

    def places(self) -> list[list[int]]:
        return [it.tolist() for it in (self.positions, self.lengths, self.ids, self.slots)]

    def advance_inputs(self, requests: torch.Tensor) -> None:
        from keel.rollout.vllm_fast.install import _advance_inputs

        _advance_inputs(requests, page=PAGE, **vars(self))


@pytest.mark.parametrize("rows", [1, 2, 255, 257])
def test_each_row_gets_its_next_token(rows: int) -> None:
    made = Fields()
    requests = torch.randperm(REQUESTS)[:rows]
    made.advance_inputs(requests.to(DEVICE))
    computed = made.computed.cpu()[requests]
    block = made.table.cpu()[requests, (computed // PAGE).long()].long()
    expected = [computed, computed + 1, made.sampled.cpu()[requests, 0]]
    expected.append(block * PAGE + computed % PAGE)
    for found, wanted in zip(made.places(), expected, strict=True):
        assert found == wanted.tolist() + [-7] * (MOST - rows)


def take_steps(take: bool) -> tuple[int, list[str]]:
    """Switch step reuse on or off; return the number of reused steps and their kinds."""
    from tests.rollout import remote_engine

    def switch(engine: Any) -> tuple[int, list[str]]:
        runner = engine._llm.model_executor.driver_worker.worker.model_runner
        if not STEPS:
            STEPS[""] = runner.execute_model.__self__
            again = STEPS[""]._run_next_token

            def observed(known: Any, output: Any) -> Any:
                batch, blocks = known.state.input_batch, output.scheduled_cached_reqs.new_block_ids
                SEEN.add(f"padded {batch.num_reqs_after_padding > batch.num_reqs}")
                SEEN.add(f"new blocks {any(it is not None for it in blocks)}")
                return again(known, output)

            STEPS[""]._run_next_token = observed
        runner.execute_model = STEPS[""].execute_model if take else STEPS[""]._original
        return STEPS[""].reused, sorted(SEEN)

    return remote_engine._ENGINE._enqueue(switch).result(timeout=remote_engine.DEADLINE_S)


STEPS: dict[str, Any] = {}
SEEN: set[str] = set()


@pytest.mark.skipif(INTERPRETED, reason="no NVIDIA GPU is visible (CUDA graphs)")
@pytest.mark.parametrize("routes", [True, False])
def test_step_reuse_changes_no_sample(routes: bool, tmp_path: Path) -> None:
    make_model(tmp_path, head_dim=64)
    sampling = SamplingConfig(temperature=0.8, top_p=0.9, top_k=12, max_tokens=90)
    options = {"gpu_memory_utilization": 0.1, "recorder": "packed"}
    spec = engine_spec(tmp_path, sampling=sampling, **options)
    asked = prompts(1, shared=60, own=60)
    spec = replace(spec, dtype="bfloat16", keep_routing=routes)
    with running_engine(spec, gpu=True) as engine:

        def sampled(*, take: bool) -> tuple[list[Trajectory], int]:
            before, _ = engine.process.submit(take_steps, take).result()
            (group,) = engine.sample(asked, 13)
            after, _ = engine.process.submit(take_steps, take).result()
            return list(group.trajectories), after - before

        sampled(take=True)  # the prompt is in the cache from now on
        without, none = sampled(take=False)
        found, taken = sampled(take=True)
        _, kinds = engine.process.submit(take_steps, True).result()
    assert none == 0
    assert taken > 15
    assert {"padded True", "new blocks False", "new blocks True"} <= set(kinds)
    assert len({it.sampled_tokens for it in found}) > 4
    for mine, theirs in zip(found, without, strict=True):
        (one,), (other,) = mine.segments, theirs.segments
        assert one.token_ids_T.tolist() == other.token_ids_T.tolist()
        assert one.logp_old_T.tolist() == other.logp_old_T.tolist()
        assert one.sampling_mask.ids.tolist() == other.sampling_mask.ids.tolist()
        assert one.sampling_mask.offsets.tolist() == other.sampling_mask.offsets.tolist()
        if routes:
            assert np.array_equal(one.routes_TLK, other.routes_TLK)
