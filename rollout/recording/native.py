"""Recording with vLLM's own means: Model Runner V2 on GPUs."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from keel.configs.schema import SamplingConfig
from keel.rl.types import SamplingMasks
from keel.rollout.recording.base import Recording, Wanted, check_routed, check_tokens
from keel.rollout.spec import RecordingError
from keel.rollout.vllm_internals import runs_v2

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput

WIDEST_MASK = 1024
"""An engine that returns masks refuses requests without top_k. Evaluation with top_k: 0 then draws
from at most this many of the likeliest ids, as wide as a mask may be in the short way of Keel's own
sampler (`keel.rollout.vllm_fast.truncate_kernels.WIDEST_TOP_K`)."""


class NativeRecorder:
    """`routed_experts`, `sampling_mask` and `logprobs` of each output, checked and reshaped."""

    def __init__(self, *, routes: bool, sampling_mask: bool) -> None:
        self._routes, self._masks = routes, sampling_mask
        self._wanted: dict[str, Wanted] = {}
        self._moe_layers: NDArray[np.int64] = np.zeros(0, np.int64)

    def engine_args(self) -> dict[str, Any]:
        return {
            "enable_return_routed_experts": self._routes,
            "return_sampling_mask": self._masks,
        }

    def attach(self, engine: LLMEngine) -> None:
        if not runs_v2(engine):
            raise ValueError(
                "rollout.recorder = 'native' needs Model Runner V2, and vLLM chose the V1 runner "
                "for this model. Set VLLM_USE_V2_MODEL_RUNNER=1 where the engine starts"
            )
        layers = engine.collective_rpc("keel_moe_layers")[0]
        self._moe_layers = np.asarray(layers, np.int64)

    def sampling_args(self, sampling: SamplingConfig, wanted: Wanted) -> dict[str, Any]:
        bound = bounded_top_k(sampling, wanted) if self._masks else {}
        start = {"routed_experts_prompt_start": wanted.routes_from} if wanted.routes else {}
        return {"logprobs": 0, "flat_logprobs": True, **bound, **start}

    def expect(self, request_id: str, wanted: Wanted) -> None:
        self._wanted[request_id] = wanted

    def take(self, request_id: str, prompt_tokens: int, output: CompletionOutput) -> Recording:
        wanted = self._wanted.pop(request_id)
        tokens = len(output.token_ids)
        logp = sampled_logprobs(request_id, output)
        if not np.isfinite(logp).all():
            return Recording(logp=logp, sampling_mask=None, routes=None)
        return Recording(
            logp=logp,
            sampling_mask=kept_sets(request_id, output) if wanted.sampling_mask else None,
            routes=(
                moe_routes(
                    request_id,
                    output,
                    prompt_tokens + tokens - 1 - wanted.routes_from,
                    self._moe_layers,
                )
                if wanted.routes
                else None
            ),
        )

    def forget(self, request_id: str) -> None:
        self._wanted.pop(request_id, None)

    def pending(self) -> int:
        return len(self._wanted)


def bounded_top_k(sampling: SamplingConfig, wanted: Wanted) -> dict[str, int]:
    """What an engine that returns masks needs of a request that has no top_k."""
    if sampling.top_k > 0:
        return {}
    if wanted.routes or wanted.sampling_mask:
        raise ValueError(
            "top_k = 0: an engine that returns sampling masks needs a bound on them; set "
            "rollout.sampling.top_k"
        )
    return {"top_k": WIDEST_MASK}


def sampled_logprobs(request_id: str, output: CompletionOutput) -> NDArray[np.float32]:
    """[G] from `logprobs`, where the sampled token stands first at every position."""
    if output.logprobs is None:
        raise RecordingError(f"request {request_id}: the engine returned no logprobs")
    flat = cast("FlatLogprobs", output.logprobs)  # asked for in `sampling_args`
    check_tokens(request_id, "logprobs", len(flat), len(output.token_ids))
    first = np.asarray(flat.start_indices, np.int64)
    if not np.array_equal(np.asarray(flat.token_ids)[first], np.asarray(output.token_ids)):
        raise RecordingError(
            f"request {request_id}: the logprobs are not those of the completion's tokens"
        )
    return np.asarray(flat.logprobs, np.float32)[first]


def kept_sets(request_id: str, output: CompletionOutput) -> SamplingMasks:
    """G spans from `sampling_mask`. A missing mask never means "not truncated"."""
    if output.sampling_mask is None:
        raise RecordingError(f"request {request_id}: the engine returned no sampling mask")
    spans = output.sampling_mask.token_ids
    sizes = np.fromiter(map(len, spans), np.int64, len(spans))
    ids = np.fromiter(chain.from_iterable(spans), np.int32, int(sizes.sum()))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return checked_sets(request_id, SamplingMasks(ids=ids, offsets=offsets), output)


def checked_sets(request_id: str, kept: SamplingMasks, output: CompletionOutput) -> SamplingMasks:
    """The sets in ascending order; each must hold the token that was sampled from it."""
    check_tokens(request_id, "sampling masks", len(kept), len(output.token_ids))
    rows = np.repeat(np.arange(len(kept)), kept.sizes())
    # Ascending ids: the trainer's checks are then one pass without sorting.
    if (np.diff(kept.ids)[rows[1:] == rows[:-1]] < 0).any():
        kept = SamplingMasks(ids=kept.ids[np.lexsort((kept.ids, rows))], offsets=kept.offsets)
    holds = np.zeros(len(kept), bool)
    holds[rows[kept.ids == np.asarray(output.token_ids, np.int32)[rows]]] = True
    if not holds.all():
        raise RecordingError(
            f"request {request_id}: the sampling mask of token {int(np.argmin(holds))} of the "
            "completion does not hold the token itself"
        )
    return kept


def moe_routes(
    request_id: str, output: CompletionOutput, tokens: int, moe_layers: NDArray[np.int64]
) -> NDArray[np.int16]:
    """[tokens, L, K] from `routed_experts`, which has a row of zeros for every dense layer too."""
    if output.routed_experts is None:
        raise RecordingError(f"request {request_id}: the engine returned no routes")
    check_tokens(request_id, "rows of routes", len(output.routed_experts), tokens)
    routes = output.routed_experts[:, moe_layers].astype(np.int16)
    check_routed(request_id, routes)
    return routes
