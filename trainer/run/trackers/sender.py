"""Sends the record of a run to its trackers in background threads.

Each thread reads `metrics.jsonl` and `events.jsonl` while they grow. A slow or unreachable tracker
therefore does not delay the run, and catches up later. `trackers/NAME.json` stores how far the
thread has come.

Steps that a resumed run repeats are not sent again. If an evaluation was made after a resume, its
step has a second line, which adds the metrics of the evaluation
(`keel.trainer.run.journal.steps_of`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from keel.configs.schema import Config
from keel.trainer.run.journal import Journal
from keel.trainer.run.signals import preempted
from keel.trainer.run.trackers.tracker import (
    RunEnd,
    TrackedRun,
    Tracker,
    make_tracker,
    plain_knobs,
    without_secrets,
)

_FOLDER = "trackers"
EVENT = "tracker"
"""Kind of the events that this module writes. They are not sent."""
_RETRY_S, _MAX_RETRY_S = 10.0, 600.0
"""First and longest delay between retries; the delay doubles."""
_ABANDONED = "keel-abandoned-"
"""Prefix for the names of abandoned threads."""
_HANG_S = 120.0
_CLOSE_S, _HURRY_S = 60.0, 5.0
"""Longest wait at the end of a run, and at the end of a preempted run."""


class TrackerThread:
    """Thread that sends the record of a run to one tracker."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        folder: Path,
        knobs: Mapping[str, Any],
        say: Callable[[str], None],
        *,
        retry_s: float = _RETRY_S,
        hang_s: float = _HANG_S,
    ) -> None:
        self.name, self._make, self._folder, self._knobs = name, make, folder, knobs
        self._say, self._retry_s, self._hang_s = say, retry_s, hang_s
        self._file = folder / _FOLDER / f"{name}.json"
        state = _read_state(self._file)
        self._id: str = state.get("id", "")
        self.step: int = state.get("step", -1)
        """The last step that was sent."""
        self._lines: int = state.get("lines", 1)
        """Number of lines for that step that were sent."""
        self._events: int = state.get("events", 0)
        """Number of events that were sent or skipped."""
        self._tracker: Tracker | None = None
        self._opened = False
        self._step_lines = _Tail(folder / "metrics.jsonl")
        self._event_lines = _Tail(folder / "events.jsonl")
        self._current: tuple[int, list[dict[str, Any]]] = (-1, [])
        """The last step that was read, with its lines."""
        self._events_read = 0
        self._wake, self.done = threading.Event(), threading.Event()
        self._end: RunEnd | None = None
        self._busy_since, self._failures, self._hangs = 0.0, 0, False
        self._not_before = 0.0
        self._wake.set()
        self._thread = threading.Thread(target=self._run, name=f"keel-{name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Tell the thread that there are new lines, and warn if the tracker hangs."""
        self._wake.set()
        since = self._busy_since
        if since and not self._hangs and time.monotonic() - since > self._hang_s:
            self._hangs = True
            self._say(
                f"warning: {self.name} has not answered for {self._hang_s:.0f} s. The run "
                f"continues, and {self._folder} has everything not yet sent.{self._remedy}"
            )

    def close(self, end: RunEnd) -> None:
        """Let the thread send the rest in the background. It sets `done` when it has finished."""
        self._end = end
        self._wake.set()

    @property
    def _remedy(self) -> str:
        return f" {self._tracker.remedy}" if self._tracker is not None else ""

    def abandon(self) -> None:
        """Stop waiting for the thread and suppress its messages."""
        self._say = lambda _: None
        self._thread.name = f"{_ABANDONED}{self.name}"
        if self._tracker is not None:
            self._tracker.abandon()

    def _run(self) -> None:
        while not self.done.is_set():
            self._wake.wait()
            self._wake.clear()
            if self._end is None and time.monotonic() < self._not_before:
                continue
            end, self._busy_since = self._end, time.monotonic()
            try:
                self._send()
                if end is not None and self._tracker is not None:
                    self._tracker.close(end)
            except (Exception, SystemExit) as error:  # packages may raise anything
                self._failed(error)
            else:
                if self._failures or self._hangs:
                    self._say(f"{self.name} has caught up with the run")
                self._failures, self._hangs = 0, False
            self._busy_since = 0.0
            if end is not None:
                self.done.set()

    def _send(self) -> None:
        if self._tracker is None or not self._opened:
            tracker = self._tracker = self._make()
            name = self._folder.resolve().name
            run = TrackedRun(folder=self._folder, name=name, id=self._id, knobs=self._knobs)
            self._id, location = tracker.open(run)
            self._opened = True
            self._progressed()
            self._say(f"{self.name}: {without_secrets(location)}")
        for line in self._step_lines.unread():
            step, at = line.pop("step"), line.pop("time")
            before = self._current[1] if self._current[0] == step else []
            if (step, len(before) + 1) > (self.step, self._lines):
                sent = {name for other in before for name in other}
                self._tracker.log(step, at, {k: v for k, v in line.items() if k not in sent})
                self.step, self._lines = step, len(before) + 1
                self._progressed()
            self._current = step, [*before, line]
            self._step_lines.advance()
        for line in self._event_lines.unread():
            if self._events_read >= self._events:
                if line["kind"] != EVENT:
                    self._tracker.event(line["step"], line["time"], line["kind"], line["text"])
                self._events = self._events_read + 1
                self._progressed()
            self._events_read += 1
            self._event_lines.advance()

    def _failed(self, error: BaseException) -> None:
        """Schedule a retry. Only the first failure in a row is printed."""
        delay = min(self._retry_s * 2 ** min(self._failures, 16), _MAX_RETRY_S)
        self._not_before, self._failures = time.monotonic() + delay, self._failures + 1
        if self._failures == 1:
            text = " ".join(without_secrets(f"{type(error).__name__}: {error}").split())
            self._say(
                f"warning: {self.name}: {text}. The run continues, and {self.name} is retried and "
                f"catches up later.{self._remedy}"
            )

    def _progressed(self) -> None:
        self._busy_since = time.monotonic()
        self._file.parent.mkdir(exist_ok=True)
        counts = {"step": self.step, "lines": self._lines, "events": self._events}
        partial = self._file.with_suffix(".tmp")
        partial.write_text(json.dumps({"id": self._id, **counts}))
        partial.replace(self._file)


def has_abandoned_threads() -> bool:
    """Return True if an abandoned thread is still running, which may crash the interpreter at
    exit."""
    return any(thread.name.startswith(_ABANDONED) for thread in threading.enumerate())


def _read_state(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        state = json.loads(path.read_text())
        if isinstance(state, dict):
            return state
    return {}


class _Tail:
    """Reads the complete lines of a growing JSONL file."""

    def __init__(self, path: Path) -> None:
        self._path, self._position, self._next = path, 0, 0

    def unread(self) -> Iterator[dict[str, Any]]:
        """Yield the lines after the position of the last `advance`."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._next = self._position + len(line)
                try:
                    record = json.loads(line)
                except ValueError:  # cut by a full disk or a power failure
                    self.advance()
                    continue
                yield record

    def advance(self) -> None:
        self._position = self._next


class Trackers:
    """Runs the threads for all `run.trackers`."""

    def __init__(self, threads: Sequence[TrackerThread], say: Callable[[str], None]) -> None:
        self._threads, self._say = threads, say

    def wake(self) -> None:
        for thread in self._threads:
            thread.wake()

    def close(self, end: RunEnd, step: int, seconds: float = _CLOSE_S) -> None:
        """Wait at most `seconds` until everything up to `step` is sent."""
        for thread in self._threads:
            thread.close(end)
        until = time.monotonic() + seconds
        for thread in self._threads:
            ended = thread.done.wait(max(0.0, until - time.monotonic()))
            if not ended:
                thread.abandon()
            if not ended or thread.step < step:
                late = "" if ended else f" within {seconds:.0f} s"
                self._say(
                    f"warning: {thread.name} received {max(thread.step, 0)} of {step} steps{late}. "
                    "Resume the run to send the rest, which is in metrics.jsonl"
                )


def open_trackers(stack: ExitStack, journal: Journal, folder: Path, config: Config) -> None:
    """Start sending the record of a run to `run.trackers`. `stack` ends this when it closes."""
    if not (names := config.run.trackers):
        return
    say, knobs = partial(journal.say, EVENT), plain_knobs(config)
    threads = [TrackerThread(n, partial(make_tracker, n), folder, knobs, say) for n in names]
    trackers = Trackers(threads, say)
    journal.on_write = trackers.wake

    def close(kind: type[BaseException] | None, *_: object) -> None:
        failed = bool(journal.ends) or (kind is not None and issubclass(kind, Exception))
        completed = journal.step >= config.run.steps
        end: RunEnd = "failed" if failed else "finished" if completed else "stopped"
        journal.begin(f"sending the rest to {', '.join(names)}")
        hurry = preempted() or (kind is not None and not failed)  # such as a second Ctrl-C
        trackers.close(end, journal.step, _HURRY_S if hurry else _CLOSE_S)

    stack.push(close)
