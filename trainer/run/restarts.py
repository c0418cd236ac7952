"""Define the errors that end a training attempt, and limit automatic restarts."""

import time
from collections.abc import Callable

from keel.rl.supervisor import RestartLimit

RESUME_HINT = "start it again in the same way to resume from the last checkpoint"


class WorkerLost(RuntimeError):
    """Raised if a process or node was lost. The run can restart from its newest checkpoint."""


class CollectiveTimeout(RuntimeError):
    """Raised if a rank fails while the others are waiting for it. Nothing can be saved in this
    case."""


class OutOfMemory(WorkerLost):
    """Raised if a training step doesn't fit on a rank's GPU. Smaller micro-batches help. `dropped`
    is True if the ranks have freed all memory used by the step."""

    def __init__(self, text: str, *, dropped: bool = False) -> None:
        super().__init__(text)
        self.dropped = dropped


class UpdateOutOfMemory(RuntimeError):
    """Raised if an optimizer update doesn't fit on a GPU. Smaller micro-batches don't help."""


class Restarts:
    """Limits how many times engines and trainer can be restarted."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._restarts = limit, RestartLimit(limit, clock=clock)
        self.started = False
        """True once training has begun. A run that fails earlier is not restarted."""

    def count(self, error: WorkerLost) -> None:
        """Count a restart. Raises WorkerLost if the limit is exceeded or training hasn't begun
        yet."""
        if not self.started:
            raise error
        if times := self._restarts.count():
            raise WorkerLost(
                f"{error}\nThe run failed {times}, and run.max_restarts = {self._limit}. "
                f"{RESUME_HINT.capitalize()}"
            ) from error
