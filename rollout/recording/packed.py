"""Recording on Model Runner V2 without an object for each token.

Log-probabilities and sampling masks are taken from the steps' arrays in the scheduler, before vLLM
cuts them up by request. Routes stay on the GPU until their request is finished
(`keel.rollout.vllm_fast.routed_experts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keel.configs.schema import SamplingConfig
from keel.rollout.recording.base import (
    Recording,
    RoutesBeforePreemption,
    Wanted,
    check_routed,
    check_tokens,
)
from keel.rollout.recording.native import bounded_top_k, checked_sets
from keel.rollout.vllm_fast.scheduler import AsyncFastScheduler
from keel.rollout.vllm_fast.step_arrays import UNMASKED, Packed
from keel.rollout.vllm_internals import runs_v2, scheduler_of

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.outputs import CompletionOutput


READ_AHEAD = 16
"""Requests whose routes are read together, if they end together."""


class PackedRecorder:
    """Needs vLLM's scheduler in this process, which rollout workers have."""

    def __init__(self, *, routes: bool, sampling_mask: bool) -> None:
        self._routes, self._masks = routes, sampling_mask
        self._wanted: dict[str, Wanted] = {}
        self._before: RoutesBeforePreemption | None = None
        self._ahead: dict[str, NDArray[np.int16]] = {}

    def engine_args(self) -> dict[str, Any]:
        return {
            "enable_return_routed_experts": self._routes,
            "return_sampling_mask": self._masks,
            "scheduler_cls": AsyncFastScheduler,
            "async_scheduling": True,
            "worker_extension_cls": "keel.rollout.vllm_fast.routed_experts.RoutesExtension",
        }

    def attach(self, engine: LLMEngine) -> None:
        if not runs_v2(engine):
            raise ValueError(
                "rollout.recorder = 'packed' needs Model Runner V2, and vLLM chose the V1 runner "
                "for this model. Set VLLM_USE_V2_MODEL_RUNNER=1 where the engine starts"
            )
        self._engine, self._scheduler = engine, scheduler_of(engine)
        engine.collective_rpc("keel_sampler")
        if self._routes:
            engine.collective_rpc("keel_file_routes")
            self._scheduler.leave_routes()
            self._before = RoutesBeforePreemption(self._scheduler, self._wanted, self._rows)

    def sampling_args(self, sampling: SamplingConfig, wanted: Wanted) -> dict[str, Any]:
        if not self._masks:
            return {"logprobs": 0}
        unmasked = {} if wanted.sampling_mask else {"extra_args": {UNMASKED: True}}
        return {"logprobs": 0, **unmasked, **bounded_top_k(sampling, wanted)}

    def expect(self, request_id: str, wanted: Wanted) -> None:
        self._wanted[request_id] = wanted
        self._scheduler.recordings[request_id] = Packed(kept_wanted=wanted.sampling_mask)

    def take(self, request_id: str, prompt_tokens: int, output: CompletionOutput) -> Recording:
        wanted = self._wanted.pop(request_id)
        packed: Packed = self._scheduler.recordings.pop(request_id)
        sampled = len(output.token_ids)
        logp = packed.logprobs()
        check_tokens(request_id, "logprobs", len(logp), sampled)
        if not np.isfinite(logp).all():
            self.forget(request_id)
            return Recording(logp=logp, sampling_mask=None, routes=None)
        routes = None
        if wanted.routes:
            first, tokens = wanted.routes_from, prompt_tokens + sampled - 1
            assert self._before is not None
            blocks = self._scheduler.finished_blocks[request_id]
            routes = self._before.rows(
                request_id,
                blocks,
                first,
                tokens,
                read=lambda _, first, n: self._finished(request_id, first)[: n - first],
            )
            check_tokens(request_id, "rows of routes", len(routes), tokens - first)
            check_routed(request_id, routes)
        return Recording(
            logp=np.asarray(logp, np.float32),
            sampling_mask=checked_sets(request_id, packed.kept(), output)
            if wanted.sampling_mask
            else None,
            routes=routes,
        )

    def _finished(self, request_id: str, first: int) -> NDArray[np.int16]:
        """Rows from `first` on of a request that the last step has finished. Those of others that
        ended with it are read along, and kept until they are asked for."""
        if request_id not in self._ahead:
            blocks: dict[str, list[int]] = self._scheduler.finished_blocks
            others = {n: w.routes_from for n, w in self._wanted.items() if w.routes and n in blocks}
            ahead = {request_id: first, **dict(islice(others.items(), READ_AHEAD - 1))}
            rows = self._engine.collective_rpc(
                "keel_finished_routes", args=([(blocks[n], ahead[n]) for n in ahead],)
            )[0]
            self._ahead = dict(zip(ahead, rows, strict=True))
        return self._ahead.pop(request_id)

    def _rows(self, blocks: Sequence[int], first: int, tokens: int) -> NDArray[np.int16]:
        return self._engine.collective_rpc("keel_routes", args=(blocks, first, tokens))[0]

    def forget(self, request_id: str) -> None:
        if self._before is not None:
            self._before.forget(request_id)
        self._wanted.pop(request_id, None)
        self._scheduler.recordings.pop(request_id, None)

    def pending(self) -> int:
        return len(self._wanted)
