"""Defines the recordings of sampled tokens, and selects the recorder.

On GPUs, `NativeRecorder` reads the outputs of vLLM's Model Runner V2, and `PackedRecorder` takes
the same data before vLLM converts it to Python objects. On CPUs, `V1Recorder` hooks into the V1
runner. All three must pass the tests in `tests/rollout/recording/contract.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.recordings import NO_ROUTE, Recordings, SamplingMasks
from keel.rollout.spec import WIDEST_MASK, RecordingError

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.outputs import CompletionOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """What to record for a request."""

    routes: bool
    sampling_mask: bool
    selection: bool = False
    routes_from: int = 0
    """First position whose routes and selections are recorded. Earlier turns already recorded the
    positions before it."""


class Recorder(ABC):
    """Records the data that training needs from one engine's requests, which are identified by
    vLLM's internal ids."""

    def __init__(self, *, routes: bool, sampling_mask: bool, selection: bool = False) -> None:
        self._records_routes, self._records_masks = routes, sampling_mask
        self._records_selection = selection
        self._options: dict[str, RecordingOptions] = {}
        """Maps each unfinished request to its recording options."""
        self._saved: dict[str, NDArray[Any]] = {}
        """Rows of unfinished requests that were saved before a preemption."""

    worker_extension = "keel.weights.loader.WeightsExtension"
    """Class whose methods vLLM adds to its workers."""

    def engine_args(self) -> dict[str, Any]:
        """Return extra arguments for vLLM's engine."""
        return {}

    @abstractmethod
    def attach(self, engine: LLMEngine) -> None:
        """Attach the recorder to an engine. Raises ValueError if the model isn't supported."""

    def options(
        self, sampling: SamplingConfig, *, record: bool, routes_from: int
    ) -> RecordingOptions:
        """Return what to record for a request: nothing unless `record` is set, and no sampling
        masks unless its sampling is truncated."""
        return RecordingOptions(
            routes=record and self._records_routes,
            sampling_mask=record and self._records_masks and sampling.truncated,
            selection=record and self._records_selection,
            routes_from=routes_from,
        )

    def sampling_args(self, sampling: SamplingConfig, options: RecordingOptions) -> dict[str, Any]:
        """Return extra `SamplingParams` for a request."""
        return {}

    def expect(self, request_id: str, options: RecordingOptions) -> None:
        """Start recording a request."""
        self._options[request_id] = options

    def take(
        self, request_id: str, prompt_tokens: int, output: CompletionOutput
    ) -> tuple[NDArray[np.float32], Recordings]:
        """Remove and return the recordings of a finished request: the log-probability of each
        sampled token, after temperature and truncation, and the large arrays. Must be called before
        the engine's next step.

        Each row of routes was computed with the weights that sampled the next token, and rows of
        prompt positions with those that sampled the first token. If a log-probability is not
        finite, the completion is dropped, and there are no arrays. Raises RecordingError if a token
        is missing."""
        options, sampled = self._options.pop(request_id), len(output.token_ids)
        logp = self._logprobs(request_id, output)
        check_count(request_id, "logprobs", len(logp), sampled)
        masks = routes = selected = None
        if np.isfinite(logp).all():
            first, last = options.routes_from, prompt_tokens + sampled - 1
            if options.sampling_mask:
                masks = self._sampling_masks(request_id, output)
                masks = _sort_masks(request_id, masks, output)
            if options.routes:
                routes = self._routes(request_id, output, first, last)
                check_count(request_id, "rows of routes", len(routes), last - first)
                check_routed(request_id, routes)
            if options.selection:
                selected = self._selections(request_id, first, last)
        self.forget(request_id)
        return logp, Recordings(routes_TLK=routes, sampling_mask=masks, selected_TLb=selected)

    @abstractmethod
    def _logprobs(self, request_id: str, output: CompletionOutput) -> NDArray[np.float32]:
        """Return the log-probability of each sampled token."""

    @abstractmethod
    def _sampling_masks(self, request_id: str, output: CompletionOutput) -> SamplingMasks:
        """Return the sampling mask of each sampled token."""

    @abstractmethod
    def _routes(
        self, request_id: str, output: CompletionOutput, first: int, last: int
    ) -> NDArray[np.int16]:
        """Return the routes of the positions `first` … `last` − 1."""

    def _selections(self, request_id: str, first: int, last: int) -> NDArray[np.uint8]:
        """Return the selections of sparse attention of the positions `first` … `last` − 1."""
        raise NotImplementedError(f"{type(self).__name__} does not record selections")

    def forget(self, request_id: str) -> None:
        """Delete everything recorded for a request."""
        self._options.pop(request_id, None)
        self._saved.pop(request_id, None)

    def _save_before_preemption(
        self,
        scheduler: Any,
        read: Callable[[Sequence[int], int, int], NDArray[Any]],
        group: int = 0,
    ) -> None:
        """Save the routes or selections of requests just before vLLM preempts them.
        `read(blocks, first, tokens)` returns one row for each of the positions `first` … `tokens` −
        1 of the request with these cache blocks.

        A preempted request loses its keys and values, which are recomputed later, possibly with new
        weights. Recorders that read rows by cache slot must therefore do so before the preemption.
        """
        preempt = scheduler._preempt_request

        def patched(request: Any, *args: Any, **kwargs: Any) -> None:
            name, tokens = request.request_id, request.num_computed_tokens
            options = self._options.get(name)
            # A first token in flight counts: it is delivered after the preemption.
            begun = request.num_output_tokens + request.num_output_placeholders
            if begun and options is not None and (options.routes or options.selection):
                first = options.routes_from
                if tokens - first > len(self._saved.get(name, ())):
                    blocks = scheduler.kv_cache_manager.get_block_ids(name)[group]

                    def read_after(count: int) -> NDArray[Any]:
                        return read(blocks, first + count, tokens)

                    self._saved[name] = self._rows(name, tokens - first, read_after)
            preempt(request, *args, **kwargs)

        scheduler._preempt_request = patched

    def _rows(
        self, request_id: str, count: int, read: Callable[[int], NDArray[Any]]
    ) -> NDArray[Any]:
        """Return the `count` rows of a request. The first ones come from before a preemption, if
        rows were saved then. `read(n)` returns all others, which are those after the first n. It is
        not called if all were saved: a completion that was preempted while its last token was in
        flight has no blocks left."""
        saved = self._saved.pop(request_id, None)
        if saved is None:
            return read(0)
        if len(saved) >= count:
            return saved[:count]
        rest = read(len(saved))
        rows = np.zeros((count, *rest.shape[1:]), rest.dtype)
        rows[tuple(map(slice, saved.shape))] = saved  # selections of a shorter context are narrower
        rows[len(saved) :] = rest
        return rows


def core_of(engine: LLMEngine) -> Any:
    """Return vLLM's engine core, which runs in this process."""
    client: Any = engine.engine_core
    return client.engine_core


def recorder_name(config: RolloutConfig, *, gpu: bool, full_attention: bool = True) -> str:
    """Return the name of the recorder that `rollout.recorder` selects. `full_attention` is the
    result of `keel.model.load.full_attention`."""
    name = config.recorder
    if name == "auto" and gpu:
        return "packed" if config.packs(full_attention=full_attention) else "native"
    if name == "auto":
        return "v1"
    if (name == "v1") == gpu:
        raise ValueError(
            f"rollout.recorder = '{name}': v1 is for CPUs, because its Python hooks do not run in "
            "CUDA graphs, and native and packed are for GPUs. Use auto"
        )
    return name


def check_count(request_id: str, what: str, recorded: int, expected: int) -> None:
    """Raise RecordingError unless the number of recorded items equals `expected`."""
    if recorded != expected:
        raise RecordingError(
            f"request {request_id}: the engine recorded {recorded} {what} instead of {expected}, "
            "so the trainer cannot replay the completion"
        )


def default_top_k(sampling: SamplingConfig, options: RecordingOptions) -> dict[str, int]:
    """Return the top_k to use for requests that don't set one, on an engine that returns sampling
    masks. Raises ValueError if such a request is recorded."""
    if sampling.top_k > 0:
        return {}
    if options.routes or options.sampling_mask:
        raise ValueError(
            "rollout.sampling.top_k = 0: an engine that returns sampling masks needs a bound on "
            "them. Set top_k"
        )
    return {"top_k": WIDEST_MASK}


def _sort_masks(request_id: str, masks: SamplingMasks, output: CompletionOutput) -> SamplingMasks:
    """Sort the ids in each mask, so that the trainer can check the masks in one pass. Raises
    RecordingError if a mask doesn't contain the sampled token."""
    check_count(request_id, "sampling masks", len(masks), len(output.token_ids))
    rows = np.repeat(np.arange(len(masks)), masks.sizes())
    if (np.diff(masks.ids)[rows[1:] == rows[:-1]] < 0).any():
        masks = SamplingMasks(ids=masks.ids[np.lexsort((masks.ids, rows))], offsets=masks.offsets)
    complete = np.zeros(len(masks), bool)
    complete[rows[masks.ids == np.asarray(output.token_ids, np.int32)[rows]]] = True
    if not complete.all():
        raise RecordingError(
            f"request {request_id}: the sampling mask of token {int(np.argmin(complete))} of the "
            "completion does not hold the token itself"
        )
    return masks


def check_routed(request_id: str, routes: NDArray[np.int16]) -> None:
    """Check that every token has a route in every layer. Raises RecordingError otherwise.

    Also raises RecordingError if all routes of a layer are zero, since a real router never picks
    expert 0 for all K slots of every token.
    """
    if (routes == NO_ROUTE).any():
        raise RecordingError(f"request {request_id}: some of its tokens have no route")
    if routes.shape[2] > 1 and len(routes):
        candidates = np.flatnonzero(~routes[0].any(axis=1))  # zero in the first row
        if not routes[:, candidates].any(axis=(0, 2)).all():
            raise RecordingError(
                f"request {request_id}: the routes of a MoE layer are all zeros, so they were not "
                "recorded"
            )
