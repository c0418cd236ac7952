"""Failures that end a training attempt, and the limit on automatic restarts."""

from __future__ import annotations

import time
from collections.abc import Callable

RESUME_HINT = "start it again in the same way to resume from the last checkpoint"
WINDOW_S = 3 * 3600.0


class WorkerLost(RuntimeError):
    """A process or node died or stopped answering; a restart from the last checkpoint helps."""


class CollectiveTimeout(RuntimeError):
    """A rank raised while the others wait for it in a collective.

    No checkpoint can be written, and a restart would fail in the same way.
    """


class OutOfMemory(WorkerLost):
    """A training step did not fit on a rank's GPU; smaller micro-batches help.

    `dropped`: the ranks are alive and hold nothing of the failed step.
    """

    def __init__(self, text: str, *, dropped: bool = False) -> None:
        super().__init__(text)
        self.dropped = dropped


class UpdateOutOfMemory(RuntimeError):
    """The optimizer update did not fit on a rank's GPU; smaller micro-batches do not help."""


class Restarts:
    """Counts restarts of engines and trainer within a sliding window of `WINDOW_S`."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """limit: `run.max_restarts`."""
        self._limit, self._clock = limit, clock
        self._times: list[float] = []
        self.started = False
        """Set once training has begun: a run that cannot start is not restarted."""

    def count(self, error: WorkerLost) -> None:
        """Count one restart, or raise `error` with a hint if no restart is allowed."""
        if not self.started:
            raise error
        now = self._clock()
        self._times = [at for at in self._times if now - at < WINDOW_S]
        if len(self._times) >= self._limit:
            losses = f"loss {len(self._times) + 1} within {WINDOW_S / 3600:g} hours, "
            raise WorkerLost(
                f"{error}\n{losses}run.max_restarts = {self._limit}. {RESUME_HINT.capitalize()}"
            ) from error
        self._times.append(now)
