"""Errors that end a training attempt."""

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
