"""Calls methods of all trainer ranks, each with a deadline, and explains which rank failed.

The functions of `ray_timeouts` are Ray's own with a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from keel.configs.schema import Config
from keel.model import ray_timeouts
from keel.model.ray_timeouts import NODE_LOST_S
from keel.trainer.run.checkpoint import SaveError
from keel.trainer.run.errors import CollectiveTimeout, OutOfMemory, WorkerLost

STEP = "an optimizer step"
_REPORT_S = 5.0  # for the other ranks' reports if one has failed, unless a lost rank is the cause
_OWN_FAILURES = ("SaveError", "UpdateOutOfMemory", "OutOfMemoryError")
"""Errors of a rank that cannot be a consequence of another rank's death."""
_SLOWDOWN, _MIN_S = 10.0, 300.0
"""A repeated call is considered lost after this multiple of its expected duration, but never before
this many seconds."""
_LOG_LINES = 15


class CallDeadline:
    """Deadline for one or several calls to the ranks, which starts now, and the knob to name in the
    error message if it passes."""

    def __init__(self, what: str, seconds: float, knob: str) -> None:
        self.what, self.seconds, self.knob = what, seconds, knob
        self.time_left = ray_timeouts.Deadline(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocation:
    """A rank's host, process and files."""

    host: str
    pid: int
    log: str
    """Path of the file with the process's standard error, or an empty string if unknown."""
    mark: str
    """Text of the mark in the run folder, or an empty string if the rank does not see it."""

    def last_lines(self) -> str:
        log = Path(self.log)
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        return "\n".join(["last lines of its log:", *lines[-_LOG_LINES:]]) if lines else ""


class RankCalls:
    """Calls the trainer ranks from the driver."""

    def __init__(self, ranks: Sequence[Any], config: Config, *, direct: bool) -> None:
        """Set `direct` if the ranks send weights to the engines themselves, so that calls
        may have to wait for them."""
        self.actors, self.config, self._direct = ranks, config, direct
        self._order = threading.Lock()
        """Lock held while calling all ranks, so that every rank receives its calls in the same
        order."""
        self.locations: list[RankLocation] = []
        """Named in messages about lost ranks."""
        self._longest_s: dict[str, float] = {}
        """Duration of the longest call of each kind."""

    def submit(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        """Call a method on every rank, with that rank's arguments, and return the references."""
        with self._order:
            return [
                ray_timeouts.call(getattr(rank, method), *own)
                for rank, own in zip(self.actors, arguments, strict=True)
            ]

    def call_all(self, method: str, *arguments: object, deadline: CallDeadline) -> list[Any]:
        return self.wait(self.submit(method, [arguments] * len(self.actors)), deadline)

    def call_replicas(self, method: str, inputs: Sequence[Any], what: str) -> list[Any]:
        """Call `method` on every rank with the input of its data-parallel replica. See
        `call_timed`."""
        stored = [(ray_timeouts.put(one),) for one in inputs]  # each rank fetches only its own
        size = self.config.trainer.sequence_parallel
        arguments = [stored[rank // size] for rank in range(len(self.actors))]
        return self.call_timed(method, arguments, what)

    def call_timed(
        self, method: str, arguments: Sequence[tuple[object, ...]], what: str, steps: int = 1
    ) -> list[Any]:
        """Call `method` on every rank with that rank's arguments. The deadline allows for `steps`
        optimizer steps and for the duration of earlier calls."""
        began = time.monotonic()
        refs = self.submit(method, arguments)
        answers = self.wait(refs, self.deadline(what, steps, estimated=True))
        if not getattr(answers[0], "out_of_memory", ""):  # such a step ended early
            seconds = time.monotonic() - began
            self._longest_s[what] = max(self._longest_s.get(what, 0.0), seconds)
        return answers

    def deadline(self, what: str, steps: int = 1, *, estimated: bool = False) -> CallDeadline:
        """Return the deadline of a call: `trainer.timeout_s` per optimizer step, plus the time to
        send weights, because a rank may still be sending. If `estimated` is set and the longest
        call so far suggests less, the deadline is shorter."""
        sending_s = self.config.sending_timeout_s if self._direct else 0.0
        knob = "trainer.timeout_s"
        knob += ", and rollout.update_timeout_s of engines" * (sending_s > 0)
        seconds = steps * self.config.trainer.timeout_s + sending_s
        if estimated and what in self._longest_s:
            longest_s = self._longest_s[what]
            expected = max(_MIN_S, _SLOWDOWN * longest_s) + sending_s
            if expected < seconds:
                knob = f"earlier calls took up to {longest_s:.0f} s; at most {knob}"
                return CallDeadline(what, expected, knob)
        return CallDeadline(what, seconds, knob)

    def wait(
        self,
        refs: Sequence[ray.ObjectRef[Any]],
        deadline: CallDeadline,
        on_result: Callable[[Any], object] = lambda _: None,
    ) -> list[Any]:
        """Wait for one call on each rank and return the results in rank order. If a rank fails, its
        error is raised without waiting long for the other ranks, which are then stuck in a
        collective."""
        remaining = deadline.time_left
        waiting = {ref: rank for rank, ref in enumerate(refs)}
        results: dict[int, Any] = {}
        failures: dict[int, RayError] = {}
        while waiting and not any(map(ray_timeouts.is_loss, failures.values())):
            before = len(waiting)
            for ref in ray_timeouts.wait(list(waiting), seconds=remaining)[0]:
                rank = waiting[ref]
                try:
                    results[rank] = ray_timeouts.get(ref, seconds=ray_timeouts.CALL_S)
                    on_result(results[rank])
                except RayError as error:
                    if type(error) is GetTimeoutError:  # of our own call, not raised by the rank
                        continue
                    if not failures:
                        # The death of another rank first shows as an error of collectives
                        # (RuntimeError) or sockets (OSError).
                        cause = ray_timeouts.cause(error)
                        own = _error_name(cause) in _OWN_FAILURES
                        lost = isinstance(cause, RuntimeError | OSError) and not own
                        remaining = ray_timeouts.Deadline(NODE_LOST_S if lost else _REPORT_S)
                    failures[rank] = error
                del waiting[ref]
            if len(waiting) == before and not remaining.remaining():
                break
        if failures:
            raise self._combine_failures(failures, deadline.what, stuck=bool(waiting))
        if waiting:
            late = ", ".join(str(rank) + self._describe_rank(rank) for rank in waiting.values())
            raise WorkerLost(
                f"waited {deadline.seconds:.0f} s for {deadline.what}: no answer from trainer rank "
                f"{late} ({deadline.knob})"
            )
        return [results[rank] for rank in range(len(refs))]

    def _describe_rank(self, rank: int) -> str:
        if rank >= len(self.locations):  # not known before the start
            return ""
        return f" (process {self.locations[rank].pid} on {self.locations[rank].host})"

    def _combine_failures(
        self, failures: Mapping[int, RayError], what: str, *, stuck: bool
    ) -> RuntimeError:
        """Combine failures of several ranks into one error. If a rank died, its death is reported
        as the cause of the others. Set `stuck` if some ranks haven't answered."""
        lost = [rank for rank, error in failures.items() if ray_timeouts.is_loss(error)]
        rank = lost[0] if lost else next(iter(failures))
        error, cause = failures[rank], ray_timeouts.cause(failures[rank])
        if isinstance(cause, SaveError):  # the ranks are intact
            return SaveError(str(cause))
        text = f"trainer rank {rank} failed during {what}: {cause}"
        if isinstance(error, RayActorError):
            why = ray_timeouts.death_reason(error)
            text = f"trainer rank {rank} died during {what}{why and ': '}{why}"
            if place := self._describe_rank(rank):
                text += f"{place}\n{self.locations[rank].last_lines()}"
        kind: type[RuntimeError] = CollectiveTimeout if stuck else RuntimeError
        if what == STEP and _error_name(cause) == "OutOfMemoryError":
            kind = OutOfMemory
        elif lost:
            kind = WorkerLost
        failure = kind(text)
        failure.__cause__ = error
        return failure


def _error_name(error: BaseException) -> str:
    """Return the class name of an error raised by a rank itself, or "" for an error raised by Ray.
    Ray has its own `OutOfMemoryError`, which means that a node ran out of host memory."""
    return "" if isinstance(error, RayError) else type(error).__name__
