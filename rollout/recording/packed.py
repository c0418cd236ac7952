"""Records on Model Runner V2 without creating a Python object for each token.

The scheduler keeps log-probabilities and sampling masks in arrays that cover whole steps
(`keel.rollout.vllm_fast.step_arrays`). Routes stay on the GPU until the request has finished
(`keel.rollout.vllm_fast.install`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keel.configs.schema import SamplingConfig
from keel.rl.recordings import SamplingMasks
from keel.rollout.recording.base import (
    Recorder,
    RecordingOptions,
    core_of,
    default_top_k,
)
from keel.rollout.vllm_fast.scheduler import AsyncFastScheduler
from keel.rollout.vllm_fast.step_arrays import UNMASKED, PackedRecording

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.outputs import CompletionOutput

_READ_AHEAD = 16
"""Maximum number of requests whose routes are read together. They must have finished in the same
step."""


class PackedRecorder(Recorder):
    """A recorder that stores its data in arrays. vLLM's scheduler must run in this process, as it
    does in rollout workers."""

    worker_extension = "keel.rollout.vllm_fast.install.FastExtension"

    def engine_args(self) -> dict[str, Any]:
        return {
            "enable_return_routed_experts": self._records_routes,
            "return_sampling_mask": self._records_masks,
            "scheduler_cls": AsyncFastScheduler,
            "async_scheduling": True,
        }

    def attach(self, engine: LLMEngine) -> None:
        self._engine, self._scheduler = engine, core_of(engine).scheduler
        self._ahead: dict[str, NDArray[np.int16]] = {}
        """Routes read ahead in a call for another request, by the request that will take them."""
        engine.collective_rpc("keel_install_fast", args=(self._records_routes,))
        if self._records_routes:
            self._scheduler.aux_output_connector = None  # routes stay on the GPU
            self._save_before_preemption(self._scheduler, self._read)

    def sampling_args(self, sampling: SamplingConfig, options: RecordingOptions) -> dict[str, Any]:
        if not self._records_masks:
            return {"logprobs": 0}
        unmasked = {} if options.sampling_mask else {"extra_args": {UNMASKED: True}}
        return {"logprobs": 0, **unmasked, **default_top_k(sampling, options)}

    def expect(self, request_id: str, options: RecordingOptions) -> None:
        super().expect(request_id, options)
        self._scheduler.recordings[request_id] = PackedRecording(with_masks=options.sampling_mask)

    def _logprobs(self, request_id: str, output: CompletionOutput) -> NDArray[np.float32]:
        return np.asarray(self._scheduler.recordings[request_id].logprobs(), np.float32)

    def _sampling_masks(self, request_id: str, output: CompletionOutput) -> SamplingMasks:
        return self._scheduler.recordings[request_id].sampling_masks()

    def _routes(
        self, request_id: str, output: CompletionOutput, first: int, last: int
    ) -> NDArray[np.int16]:
        def read_after(count: int) -> NDArray[np.int16]:
            return self._finished_rows(request_id, first, last - first)[count:]

        return self._rows(request_id, last - first, read_after)

    def _finished_rows(self, request_id: str, first: int, count: int) -> NDArray[np.int16]:
        """Return `count` rows of routes, starting at position `first`, of a request that finished
        in the last step. If other requests finished in that step, their routes are read in the same
        call and kept for their own `take`."""
        if request_id not in self._ahead:
            blocks: dict[str, list[int]] = self._scheduler.finished_blocks
            others = (n for n, o in self._options.items() if o.routes and n in blocks)
            starts = {n: self._options[n].routes_from for n in islice(others, _READ_AHEAD - 1)}
            starts = {request_id: first, **starts}
            rows = self._engine.collective_rpc(
                "keel_finished_routes", args=([(blocks[n], starts[n]) for n in starts],)
            )[0]
            self._ahead = dict(zip(starts, rows, strict=True))
        return self._ahead.pop(request_id)[:count]

    def _read(self, blocks: Sequence[int], first: int, tokens: int) -> NDArray[np.int16]:
        return self._engine.collective_rpc("keel_routes", args=(blocks, first, tokens))[0]

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._scheduler.recordings.pop(request_id, None)
