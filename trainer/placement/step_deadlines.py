"""Computes deadlines for calls to trainer ranks, based on how long earlier calls took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.model.ray_timeouts import Deadline
from keel.rl.packing import TrainBatch

_SLOWDOWN, _MIN_S = 10.0, 300.0
"""A repeated call counts as lost if it takes this many times its expected duration, but not before
this many seconds have passed."""


@dataclass(frozen=True, slots=True)
class StepDeadline:
    """The deadline for one wait, and the knob to name in the error when the deadline passes."""

    what: str
    seconds: float
    knob: str
    left: Deadline | None = None
    """The remaining time if several waits share one deadline."""


class StepDeadlines:
    """Computes the deadline for each kind of call."""

    def __init__(self, timeout_s: float, sending_s: float) -> None:
        """Allow `timeout_s` (`trainer.timeout_s`) for each optimizer step. `sending_s` is
        additional time for weights that are still being sent."""
        self._timeout_s, self._sending_s = timeout_s, sending_s
        self._knobs = "trainer.timeout_s"
        self._knobs += ", and rollout.update_timeout_s of engines" * (sending_s > 0)
        self._longest_s: dict[str, float] = {}
        self._slowest_pace_s: dict[str, float] = {}

    def of(self, what: str, times: int = 1) -> StepDeadline:
        """Return the configured deadline for a call that takes `times` optimizer steps."""
        return StepDeadline(what, times * self._timeout_s + self._sending_s, self._knobs)

    def likely(self, what: str, work: int, times: int = 1) -> StepDeadline:
        """Return a deadline based on how long earlier calls took. Return the configured deadline if
        it is shorter or there were no earlier calls. `work` is the number of micro-batches in the
        call (`micro_batch_count`)."""
        longest = self.of(what, times)
        if what not in self._longest_s:
            return longest
        expected_s = max(self._longest_s[what], self._slowest_pace_s[what] * work)
        seconds = max(_MIN_S, _SLOWDOWN * expected_s) + self._sending_s
        if seconds >= longest.seconds:
            return longest
        knob = f"by earlier calls, about {expected_s:.0f} s were expected; at most {self._knobs}"
        return StepDeadline(what, seconds, knob)

    def took(self, what: str, work: int, seconds: float) -> None:
        """Record how long a call took."""
        self._longest_s[what] = max(self._longest_s.get(what, 0.0), seconds)
        pace_s = seconds / max(1, work)
        self._slowest_pace_s[what] = max(self._slowest_pace_s.get(what, 0.0), pace_s)


def micro_batch_count(share: Sequence[TrainBatch] | Mapping[str, TrainBatch]) -> int:
    """Return the number of micro-batches in a call to one group of ranks. It is the same for all
    groups."""
    batches: Sequence[Any] = list(share.values()) if isinstance(share, Mapping) else share
    return sum(len(batch.micro_batches) + len(batch.scored_first) for batch in batches)
