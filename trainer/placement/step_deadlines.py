"""How long the trainer's ranks are waited for, and what to say when that was not enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.model.ray_timeouts import Deadline
from keel.rl.packing import TrainBatch

MANY, AT_LEAST_S = 10.0, 300.0
"""What has been done before is taken for lost after so many times as long as it is likely to take,
and no sooner than this; the first time after `trainer.timeout_s`."""


@dataclass(frozen=True, slots=True)
class StepDeadline:
    """Of one wait."""

    what: str
    seconds: float
    knob: str
    left: Deadline | None = None
    """Where several waits share it."""


class StepDeadlines:
    """Of all that ranks are asked for."""

    def __init__(self, timeout_s: float, sending_s: float) -> None:
        """timeout_s: `trainer.timeout_s`. sending_s: the ranks may first have to send the weights
        of the step before."""
        self._timeout_s = timeout_s
        self._knobs = "trainer.timeout_s" + ", and rollout.update_timeout_s of engines" * (
            sending_s > 0
        )
        self._sending_s = sending_s
        self._longest: dict[str, float] = {}
        self._pace: dict[str, float] = {}
        """Most seconds that anything took so far, and that a part of its work did."""

    def of(self, what: str, times: int = 1) -> StepDeadline:
        """times: that `trainer.timeout_s` counts, as for optimizer steps in one call."""
        return StepDeadline(what, times * self._timeout_s + self._sending_s, self._knobs)

    def likely(self, what: str, work: int, times: int = 1) -> StepDeadline:
        """As `of`, and no longer than what has been done before makes likely of as much work."""
        most = self.of(what, times)
        if what not in self._longest:
            return most
        longest, for_this = self._longest[what], self._pace[what] * work
        seconds = max(AT_LEAST_S, MANY * max(longest, for_this)) + self._sending_s
        if seconds >= most.seconds:
            return most
        more = f", and this one likely {for_this:.0f} s" * (for_this > longest)
        return StepDeadline(
            what, seconds, f"the longest so far took {longest:.0f} s{more}; at most {self._knobs}"
        )

    def took(self, what: str, work: int, seconds: float) -> None:
        """Note how long it took once. work: as `work_of`."""
        self._longest[what] = max(self._longest.get(what, 0.0), seconds)
        self._pace[what] = max(self._pace.get(what, 0.0), seconds / max(1, work))


def micro_batch_count(share: Sequence[TrainBatch] | Mapping[str, TrainBatch]) -> int:
    """Micro-batches that a group of ranks is given at once: as many as any other group."""
    batches: Sequence[Any] = list(share.values()) if isinstance(share, Mapping) else share
    return sum(len(batch.micro_batches) + len(batch.scored_first) for batch in batches)
