"""What a new start of engines and trainer mends, and how often it may."""

from __future__ import annotations

import time
from collections.abc import Callable

RESUME_HINT = (
    "what was saved is there, and the run goes on when it is started again in the same way"
)
"""Who has started it may have called `keel.train`, and no command."""
WINDOW_S = 3 * 3600.0
"""A run of weeks outlives losses that are this far apart, however many."""


class WorkerLost(RuntimeError):
    """A process or a node is gone, or does not answer, through no fault of the recipe's that is
    known: from the last checkpoint a new one does as well."""


class CollectiveTimeout(RuntimeError):
    """A rank raised, and others wait for it in a collective: nothing more can be asked of them, not
    even a checkpoint. What raised it would do so again after a new start."""


class OutOfMemory(WorkerLost):
    """A rank's GPU was too small for a step: with smaller micro-batches a new start does better.
    `dropped`: the ranks are well, and hold nothing of the step."""

    def __init__(self, text: str, *, dropped: bool = False) -> None:
        super().__init__(text)
        self.dropped = dropped


class UpdateOutOfMemory(RuntimeError):
    """A rank's GPU was too small where an optimizer updates weights: micro-batches and activations
    are not there any more, so neither smaller ones nor a new start help."""


class Restarts:
    """How often a run has been started again from its last checkpoint."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """most: within `WINDOW_S` (`run.max_restarts`)."""
        self._most, self._clock = most, clock
        self._times: list[float] = []
        self.begun = False
        """Whether it has ever come to train: what cannot start, a new start does not mend."""

    def another(self, error: WorkerLost) -> None:
        """Count one more for `error`, or raise it with what to do about it."""
        if not self.begun:
            raise error
        now = self._clock()
        self._times = [at for at in self._times if now - at < WINDOW_S]
        if len(self._times) >= self._most:
            often = (
                f"this was loss {len(self._times) + 1} within {WINDOW_S / 3600:g} hours, and "
                if self._times
                else ""
            )
            raise WorkerLost(
                f"{error}\n{often}run.max_restarts = {self._most}. {RESUME_HINT.capitalize()}"
            ) from error
        self._times.append(now)
