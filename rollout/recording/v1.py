"""Recording on the V1 model runner, which returns neither routes nor sampling masks itself (CPUs).

Three places to listen, none of them patched: each router's capture function, a forward hook on the
model, and a forward hook on the sampler's last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm import LLMEngine
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.outputs import CompletionOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec

from keel.configs.schema import SamplingConfig
from keel.rl.types import NO_ROUTE, SamplingMasks
from keel.rollout.recording.base import (
    Recording,
    RoutesBeforePreemption,
    Wanted,
    check_routed,
    check_tokens,
)
from keel.rollout.spec import RecordingError
from keel.rollout.vllm_internals import scheduler_of
from keel.weights.loader import moe_runners


class RouteTable:
    """The experts of every token whose keys and values are in the cache, by cache slot.

    A token has one slot for as long as anything attends to it, so its route is where its keys are:
    tokens computed chunk by chunk, taken over from another request's prefix or computed again after
    a preemption are all found by the request's block table. Rows are overwritten with the slots.
    """

    def __init__(self, runner: Any) -> None:
        groups = runner.kv_cache_config.kv_cache_groups
        if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
            kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
            raise ValueError(
                "rollout.recorder = 'v1': keeps routes by cache slot, which needs full attention "
                f"in every layer; this model has {', '.join(kinds)}"
            )
        layers = moe_runners(runner.model)
        experts = {moe.moe_config.num_experts for moe in layers}
        widths = {moe.moe_config.experts_per_token for moe in layers}
        if len(widths) != 1 or max(experts) > np.iinfo(np.int16).max:
            raise ValueError(
                f"routes need one number of experts a token in every MoE layer and expert ids that "
                f"fit int16; this model has {sorted(widths)} of {sorted(experts)}"
            )
        self._batch = runner.input_batch
        block = self._block = groups[0].kv_cache_spec.block_size
        shape = (len(layers), widths.pop())
        self._slots = torch.full(
            (runner.kv_cache_config.num_blocks * block, *shape), NO_ROUTE, dtype=torch.int16
        )
        tokens = runner.scheduler_config.max_num_batched_tokens
        self._step = torch.empty((tokens, *shape), dtype=torch.int16)
        for index, moe in enumerate(layers):
            if not isinstance(moe.router, BaseRouter):
                raise ValueError(f"routes of {type(moe.router).__name__} cannot be recorded")
            moe.router.set_capture_fn(partial(self._capture, index))
        runner.model.register_forward_hook(self._file)

    def _capture(self, layer: int, topk_ids: Tensor) -> None:
        self._step[: len(topk_ids), layer] = topk_ids

    def _file(self, model: nn.Module, args: Any, output: Any) -> None:
        mapping = get_forward_context().slot_mapping
        if isinstance(mapping, dict) and mapping:
            slots = next(iter(mapping.values()))
            self._slots[slots] = self._step[: len(slots)]

    def blocks(self, request_id: str) -> list[int]:
        """Cache blocks of a request that is still in the runner's batch."""
        row = self._batch.req_id_to_index.get(request_id)
        if row is None:
            raise RecordingError(
                f"request {request_id}: left the batch before its routes were read"
            )
        return self._batch.block_table[0].get_numpy_array()[row].tolist()

    def rows(self, blocks: Sequence[int], first: int, tokens: int) -> NDArray[np.int16]:
        """[tokens − first, L, K] of a request that has these cache blocks."""
        positions = np.arange(first, tokens)
        begins = np.asarray(blocks, np.int64)[positions // self._block] * self._block
        return self._slots[torch.from_numpy(begins + positions % self._block)].numpy()


class Draws:
    """What one sampling step drew, for every row of its batch."""

    __slots__ = ("kept", "logp", "tokens")

    def __init__(
        self, tokens: list[int], logp: list[float], kept: list[NDArray[np.int32]] | None
    ) -> None:
        self.tokens, self.logp, self.kept = tokens, logp, kept


class DrawLog:
    """The draws of each live request, in order."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._live: dict[str, list[tuple[Draws, int]]] = {}
        self._truncated: dict[str, bool] = {}
        runner.sampler.topk_topp_sampler.register_forward_hook(self._drawn)

    def open(self, request_id: str, *, truncated: bool) -> None:
        self._live[request_id] = []
        self._truncated[request_id] = truncated

    def close(self, request_id: str) -> list[tuple[Draws, int]]:
        self._truncated.pop(request_id, None)
        return self._live.pop(request_id, [])

    def _drawn(self, sampler: nn.Module, args: Any, output: Any) -> None:
        (sampled, logprobs), batch = output, self._runner.input_batch
        names = batch.req_ids
        live = [(row, self._live.get(names[row])) for row in self._kept_rows(batch.num_reqs)]
        if not any(draws is not None for _, draws in live):
            return
        tokens = sampled.long()
        logp = logprobs.gather(1, tokens[:, None])[:, 0]
        step = Draws(tokens.tolist(), logp.tolist(), self._supports(logprobs, names))
        for row, draws in live:
            if draws is not None:
                draws.append((step, row))

    def _kept_rows(self, rows: int) -> list[int]:
        """Rows whose token stays. The others are chunks of a prompt that is not finished."""
        return np.flatnonzero(~self._runner.discard_request_mask.np[:rows]).tolist()

    def _supports(self, logprobs: Tensor, names: list[str]) -> list[NDArray[np.int32]] | None:
        """The ids of finite probability in each row: what truncation left."""
        wanted = torch.tensor([self._truncated.get(name, False) for name in names[: len(logprobs)]])
        if not wanted.any():
            return None
        rows, ids = (logprobs.isfinite() & wanted[:, None]).nonzero(as_tuple=True)
        ends = rows.bincount(minlength=len(logprobs)).cumsum(0)[:-1]
        return np.split(ids.to(torch.int32).numpy(), ends.numpy())


class V1Recorder:
    """A `RouteTable` and a `DrawLog` on the runner inside this process."""

    def __init__(self, *, routes: bool, sampling_mask: bool) -> None:
        self._with_routes = routes
        self._wanted: dict[str, Wanted] = {}
        self._before: RoutesBeforePreemption | None = None
        self._routes: RouteTable | None = None
        self._draws: DrawLog | None = None

    def engine_args(self) -> dict[str, Any]:
        return {}

    def attach(self, engine: LLMEngine) -> None:
        runner = engine.model_executor.driver_worker.model_runner
        self._draws = DrawLog(runner)
        if self._with_routes:
            self._routes = RouteTable(runner)
            self._before = RoutesBeforePreemption(
                scheduler_of(engine), self._wanted, self._routes.rows
            )

    def sampling_args(self, sampling: SamplingConfig, wanted: Wanted) -> dict[str, Any]:
        return {}

    def expect(self, request_id: str, wanted: Wanted) -> None:
        assert self._draws is not None
        self._wanted[request_id] = wanted
        self._draws.open(request_id, truncated=wanted.sampling_mask)

    def take(self, request_id: str, prompt_tokens: int, output: CompletionOutput) -> Recording:
        assert self._draws is not None
        wanted, draws = self._wanted.pop(request_id), self._draws.close(request_id)
        tokens = list(output.token_ids)
        check_tokens(request_id, "draws", len(draws), len(tokens))
        if [step.tokens[row] for step, row in draws] != tokens:
            raise RecordingError(
                f"request {request_id}: the recorded tokens are not the completion's"
            )
        kept = routes = None
        if wanted.sampling_mask:
            kept = SamplingMasks.from_lists([step.kept[row] for step, row in draws if step.kept])
        if wanted.routes:
            assert self._routes is not None and self._before is not None
            blocks = self._routes.blocks(request_id)
            last = prompt_tokens + len(tokens) - 1
            routes = self._before.rows(request_id, blocks, wanted.routes_from, last)
            check_routed(request_id, routes)
        return Recording(
            logp=np.array([step.logp[row] for step, row in draws], np.float32),
            sampling_mask=kept,
            routes=routes,
        )

    def forget(self, request_id: str) -> None:
        self._wanted.pop(request_id, None)
        if self._before is not None:
            self._before.forget(request_id)
        if self._draws is not None:
            self._draws.close(request_id)

    def pending(self) -> int:
        return len(self._wanted)
