"""What a recorder notes about every sampled token, and the choice between them.

`NativeRecorder` reads what vLLM's Model Runner V2 returns (GPUs). `PackedRecorder` takes the same
data before vLLM makes objects of it (GPUs). `V1Recorder` listens to the V1 runner from inside
(CPUs). All give the same thing, and one contract test holds them to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.types import NO_ROUTE, SamplingMasks
from keel.rollout.spec import RecordingError
from keel.rollout.vllm_internals import before_preemption

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.outputs import CompletionOutput

RecorderName = Literal["native", "packed", "v1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What the engine did for one completion of G tokens to a prompt of P tokens."""

    logp: NDArray[np.float32]
    """[G] log-probability of each sampled token, under temperature and truncation. Where one is not
    finite, its completion is dropped, and nothing else of it need be here: the logits were no
    numbers, so that a sampling mask may not hold its token."""
    sampling_mask: SamplingMasks | None
    """G spans. None: sampling was not truncated, or was not to be recorded."""
    routes: NDArray[np.int16] | None
    """[P+G−1−F, L, K] experts of the MoE layers from position F = `Wanted.routes_from` on, each row
    under the weights that sampled the token after it (in a prompt: the first of the completion).
    None: none, or not to be recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to record of one request."""

    routes: bool
    sampling_mask: bool
    routes_from: int = 0
    """The first position whose routes are wanted: an earlier turn has brought those before."""


class Recorder(Protocol):
    """Bound to one engine. Requests are known by vLLM's internal ids."""

    def engine_args(self) -> dict[str, Any]:
        """What the engine has to be built with."""
        ...

    def attach(self, engine: LLMEngine) -> None:
        """Bind to the engine. Raises `ValueError` for a model that it cannot record."""
        ...

    def sampling_args(self, sampling: SamplingConfig, wanted: Wanted) -> dict[str, Any]:
        """Additions to the request's `SamplingParams`."""
        ...

    def expect(self, request_id: str, wanted: Wanted) -> None:
        """Record this request from now on."""
        ...

    def take(self, request_id: str, prompt_tokens: int, output: CompletionOutput) -> Recording:
        """The recording of a finished request, which is then forgotten.

        Must be called before the engine's next step. Raises `RecordingError` when any token of it
        is missing.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Drop what was recorded of an aborted request."""
        ...

    def pending(self) -> int:
        """Requests that something is held for."""
        ...


def recorder_name(config: RolloutConfig, *, gpu: bool, full_attention: bool = True) -> RecorderName:
    """The recorder that `rollout.recorder` asks for. `full_attention`: of the model, as
    `keel.model.load.full_attention` has it."""
    name = config.recorder
    if name == "auto" and gpu:
        return "packed" if config.packs(full_attention=full_attention) else "native"
    if name == "auto":
        return "v1"
    if name in ("native", "packed") and not gpu:
        raise ValueError(
            f"rollout.recorder = '{name}': vLLM's Model Runner V2 needs a GPU. Use auto or v1 here"
        )
    if name == "v1" and gpu:
        raise ValueError(
            "rollout.recorder = 'v1': it follows a batch step by step on a CPU, and CUDA graphs "
            "would leave it behind. Use auto or native here"
        )
    return name


class RoutesBeforePreemption:
    """For recorders that read routes where the keys are, when a completion is finished.

    A request that is preempted loses its keys, and has them computed again later: by other weights,
    if those have changed (a change preempts all running requests). Here its rows are read before.
    """

    def __init__(
        self,
        scheduler: Any,
        wanted: Mapping[str, Wanted],
        read: Callable[[Sequence[int], int, int], NDArray[np.int16]],
    ) -> None:
        """`read(blocks, first, tokens)`: rows [tokens − first, L, K] of the positions from `first`
        on of a request with these cache blocks."""
        self._rows: dict[str, NDArray[np.int16]] = {}
        self._wanted, self._read = wanted, read
        before_preemption(scheduler, self._preempted)

    def _preempted(self, request: str, blocks: Callable[[], Sequence[int]], tokens: int) -> None:
        wanted = self._wanted.get(request)
        if wanted is None or not wanted.routes:
            return
        if tokens - wanted.routes_from > len(self._rows.get(request, ())):
            self._rows[request] = self.rows(request, blocks(), wanted.routes_from, tokens)

    def rows(
        self,
        request_id: str,
        blocks: Sequence[int],
        first: int,
        tokens: int,
        read: Callable[[Sequence[int], int, int], NDArray[np.int16]] | None = None,
    ) -> NDArray[np.int16]:
        """[tokens − first, L, K] of a request, those read before a preemption first; forgets these.
        `first`: as wanted. `read`: another way to read the rest.

        A completion whose last token was in flight at the preemption has no blocks any more, and
        all of its rows were read then.
        """
        read = read or self._read
        before = self._rows.pop(request_id, None)
        if before is None:
            return read(blocks, first, tokens)
        if len(before) >= tokens - first:
            return before[: tokens - first]
        rows = read(blocks, first, tokens)
        rows[: len(before)] = before
        return rows

    def forget(self, request_id: str) -> None:
        self._rows.pop(request_id, None)


def check_tokens(request_id: str, what: str, recorded: int, expected: int) -> None:
    """Raise unless exactly `expected` entries were recorded."""
    if recorded != expected:
        raise RecordingError(
            f"request {request_id}: the engine recorded {recorded} {what} where {expected} are "
            "due; the trainer could not replay the completion"
        )


def check_routed(request_id: str, routes: NDArray[np.int16]) -> None:
    """Raise if a token has no route, or if a MoE layer sent every token to expert 0 K times over,
    which no router does."""
    none = routes == NO_ROUTE
    if none.any():
        missing = np.flatnonzero(none.any(axis=(1, 2)))
        raise RecordingError(
            f"request {request_id}: {len(missing)} of its {len(routes)} tokens have no route, "
            f"token {missing[0]} first: the engine did not record them"
        )
    if routes.shape[2] > 1 and len(routes):
        first = np.flatnonzero(~routes[0].any(axis=1))  # no other layer can be blank in every row
        blank = first[~routes[:, first].any(axis=(0, 2))]
        if len(blank):
            raise RecordingError(
                f"request {request_id}: the routes of MoE layers {blank.tolist()} (counted among "
                "the MoE layers) are all zeros: they were not recorded"
            )
