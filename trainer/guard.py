"""Save checkpoints during a run, and when it is aborted or fails."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from keel.configs.schema import RunConfig
from keel.rl.futures import Cancelled
from keel.rl.metrics import Metric, Sum
from keel.rl.types import ScoredGroup, StepResult
from keel.trainer.batch_stream import Batch, BatchStream, EmptyBatch

Save = Callable[[int, Mapping[str, Any]], bool]
"""Writes a checkpoint for a step and a data position. Returns True if it was written, and False if
writing failed but the run should continue."""


class RunJournal(Protocol):
    """Records a run's results and displays its progress."""

    def begin(self, activity: str) -> None: ...

    def show_progress(self, done: int, total: int, unit: str) -> None: ...

    def record(
        self,
        step: int,
        metrics: Mapping[str, Metric],
        groups: Sequence[ScoredGroup],
        discarded: Sequence[ScoredGroup] = (),
    ) -> None: ...

    def evaluated(self, step: int) -> bool: ...


@dataclass(slots=True)
class Saver:
    """Decides when a checkpoint is due, writes it, and keeps track of failed writes."""

    write: Save
    run: RunConfig
    saved: int  # the step of the newest checkpoint, or the step at which the run started
    tried_at: float = field(default_factory=lambda: time.monotonic())
    unwritten: int = 0

    def due(self, step: int) -> bool:
        run, since_s = self.run, time.monotonic() - self.tried_at
        by_steps = run.checkpoint_every > 0 and step % run.checkpoint_every == 0
        return step == run.steps or by_steps or 0 < run.checkpoint_minutes * 60 <= since_s

    def save(self, step: int, position: Mapping[str, Any]) -> bool:
        written = self.write(step, position)
        self.saved, self.tried_at = step if written else self.saved, time.monotonic()
        self.unwritten += not written
        return written

    def metrics(self) -> dict[str, Metric]:
        return {"checkpoint/unwritten": Sum(self.unwritten)} if self.unwritten else {}


class RunGuard:
    """Saves a final checkpoint when a run ends early.

    This happens if the run is aborted, or if sampling, scoring, publishing or evaluating fails and
    `handle_failure(error)` returns True. If an optimizer step fails, no checkpoint is saved,
    because the learner's state is lost.
    """

    def __init__(
        self,
        run: RunConfig,
        start: int,
        stream: BatchStream,
        journal: RunJournal,
        save: Save,
        should_abort: Callable[[], bool],
        handle_failure: Callable[[Exception], bool],
    ) -> None:
        self.reached = start  # the last completed step
        self.saver = Saver(save, run, start)
        self._stream, self._journal = stream, journal
        self._should_abort, self._handle_failure = should_abort, handle_failure
        self._deferred: Exception | None = None

    @contextmanager
    def run(self) -> Iterator[None]:
        try:
            yield
        except Cancelled:
            self._stream.close()  # or saving waits for engines that have to make room
            if self.saver.saved < self.reached:
                self.saver.save(self.reached, self._stream.position())
        finally:
            self._stream.close()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        self._journal.begin("sampling")
        try:
            yield
        except Cancelled:
            raise
        except Exception as error:
            if self._handle_failure(error):
                self.final_checkpoint(error)
            raise

    @contextmanager
    def deferred_errors(self, activity: str) -> Iterator[None]:
        """Return a context for an activity after a step. Errors inside it are held back and raised
        by `finish`."""
        self._journal.begin(activity)
        try:
            yield
        except Cancelled:
            pass
        except Exception as error:
            if not self._handle_failure(error):
                raise
            self._deferred = error

    def continues(self, result: StepResult) -> bool:
        return not (result.gave_up or self._deferred or self._should_abort())

    def finish(
        self, step: int, metrics: Mapping[str, Metric], batch: Batch, result: StepResult
    ) -> None:
        """Record a step. Raises the error deferred by `deferred_errors`, if any, or RuntimeError if
        the learner gave up."""
        self._journal.record(step, metrics, batch.groups, batch.discarded)
        if result.gave_up:  # without a checkpoint: the policy may be broken
            raise RuntimeError(f"step {step}: {result.gave_up}")
        self.reached = step
        if self._deferred is not None:
            self.final_checkpoint(self._deferred)
            raise self._deferred

    def save(self, step: int) -> bool:
        self._journal.begin("saving a checkpoint")
        if self._should_abort():
            self._stream.close()
        return self.saver.save(step, self._stream.position())

    def final_checkpoint(self, error: Exception) -> None:
        """Save the last completed step before `error` ends the run, and add a note to the error
        explaining how to resume."""
        self._stream.close()
        untrained = error.prompts if isinstance(error, EmptyBatch) else ()
        try:
            if self.saver.saved < self.reached:
                self._journal.begin("saving a checkpoint")
                if not self.saver.save(self.reached, self._stream.position(untrained)):
                    return
            if self.reached:
                error.add_note(f"Rerun the same command to resume from step {self.reached}")
        except Exception as second:
            error.add_note(f"No checkpoint could be written: {second}")
