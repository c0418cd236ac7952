"""Defines what is recorded for sampled tokens, and selects the recorder.

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
from keel.rl.types import NO_ROUTE, SamplingMasks
from keel.rollout.spec import RecordingError

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.outputs import CompletionOutput

_ReadRows = Callable[[Sequence[int], int, int], NDArray[Any]]
"""`read(blocks, first, tokens)` returns one row for each of the positions `first` … `tokens` − 1 of
the request with these cache blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The data recorded for a completion of G tokens after a prompt of P tokens."""

    logp: NDArray[np.float32]
    """[G] log-probability of each sampled token, after temperature and truncation. If any value is
    not finite, the completion is dropped and the other fields may be None."""
    sampling_mask: SamplingMasks | None
    """Sampling masks of the G tokens, which contain the ids that truncation kept. None if sampling
    was not truncated or if masks are not recorded."""
    routes: NDArray[np.int16] | None
    """[R, L, K] experts chosen in the MoE layers, with one row for each of the positions F … P+G−2,
    where F is `routes_from`. The last token was never an input.

    Each row was computed with the weights that sampled the next token. Rows of prompt positions
    were computed with the weights that sampled the completion's first token. None if the model has
    no experts or if routes are not recorded.
    """
    selected: NDArray[np.uint8] | None = None
    """[R, L, b] bitmaps of the positions that sparse attention selected, for the same rows as
    `routes`. None if they are not recorded."""


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
        self._routes, self._masks, self._selection = routes, sampling_mask, selection
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

    def sampling_args(self, sampling: SamplingConfig, options: RecordingOptions) -> dict[str, Any]:
        """Return extra `SamplingParams` for a request."""
        return {}

    def expect(self, request_id: str, options: RecordingOptions) -> None:
        """Start recording a request."""
        self._options[request_id] = options

    @abstractmethod
    def take(self, request_id: str, prompt_tokens: int, output: CompletionOutput) -> Recording:
        """Remove and return the recording of a finished request. Must be called before the engine's
        next step. Raises RecordingError if a token is missing."""

    def forget(self, request_id: str) -> None:
        """Delete the recording of an aborted request."""
        self._options.pop(request_id, None)
        self._saved.pop(request_id, None)

    def _save_before_preemption(self, scheduler: Any, read: _ReadRows, *, group: int = 0) -> None:
        """Save the routes or selections of requests just before vLLM preempts them.

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
                    self._saved[name] = self._rows(name, blocks, first, tokens, read)
            preempt(request, *args, **kwargs)

        scheduler._preempt_request = patched

    def _rows(
        self, request_id: str, blocks: Sequence[int], first: int, tokens: int, read: _ReadRows
    ) -> NDArray[Any]:
        """Return the rows of the positions `first` … `tokens` − 1 of a request, and delete the rows
        that were saved before a preemption.

        Rows that were not saved are read with `read`. A completion that was preempted while its
        last token was in flight has no blocks left, but all of its rows were saved.
        """
        saved = self._saved.pop(request_id, None)
        if saved is None:
            return read(blocks, first, tokens)
        if len(saved) >= tokens - first:
            return saved[: tokens - first]
        rows = read(blocks, first, tokens)
        rows[: len(saved)] = saved
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


def check_selected(request_id: str, selected: NDArray[np.uint8], first: int, top_k: int) -> None:
    """Check that every token after the first `top_k` of the context has a selection of `top_k`
    positions in every layer. Raises RecordingError otherwise.

    The first row of `selected` belongs to the token at position `first`.
    """
    counts = np.bitwise_count(selected[max(0, top_k - first) :]).sum(-1, dtype=np.int64)
    wrong = (counts != top_k).any(-1)
    if wrong.any():
        token = max(first, top_k) + int(wrong.argmax())
        raise RecordingError(
            f"request {request_id}: {int(wrong.sum())} of its tokens have no complete selection of "
            f"sparse attention, the token at position {token} first, so the trainer cannot replay "
            "the completion"
        )


def check_routed(request_id: str, routes: NDArray[np.int16]) -> None:
    """Check that every token has a route in every layer. Raises RecordingError otherwise.

    Also raises RecordingError if all routes of a layer are zero, since a real router never picks
    expert 0 for all K slots of every token.
    """
    unrouted = routes == NO_ROUTE
    if unrouted.any():
        missing = np.flatnonzero(unrouted.any(axis=(1, 2)))
        raise RecordingError(
            f"request {request_id}: {len(missing)} of its {len(routes)} tokens have no route, "
            f"token {missing[0]} first"
        )
    if routes.shape[2] > 1 and len(routes):
        candidates = np.flatnonzero(~routes[0].any(axis=1))  # blank in the first row
        blank = candidates[~routes[:, candidates].any(axis=(0, 2))]
        if len(blank):
            raise RecordingError(
                f"request {request_id}: the routes of MoE layers {blank.tolist()} (counted among "
                "the MoE layers) are all zeros, so they were not recorded"
            )
