"""What a run has written is sent on, beside it: a tracker that is slow, fails or hangs costs the
run nothing but a line.

Each tracker has a thread, which reads `metrics.jsonl` and `events.jsonl` as they grow. So nothing
waits in memory, a tracker that was away is told later what it missed, and one that a resumed run
has newly is told all of it. `trackers/NAME.json` in the run folder says how far it has got. What a
resumed run does again stands in its curves as it was sent first: no number is sent twice. A step
has a second line where its evaluation was made up for (`keel.trainer.run.journal.steps_of`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from keel.trainer.run.trackers.tracker import End, Opened, Tracked, Tracker, without_keys

FOLDER = "trackers"
OWN = "tracker"
"""The kind of event that is said here, and no tracker is told of."""
AGAIN_S, AGAIN_MOST_S = 10.0, 600.0
"""After a failure it is tried again so much later, then after twice that, and so on."""
GIVEN_UP = "keel-given-up-"
"""What the names of threads begin with that are waited for no longer."""
LATE_S = 120.0
"""A call that has not returned after this is said to hang."""
CLOSE_S, HURRY_S = 60.0, 5.0
"""Longest wait at the end for what is not sent yet; where the machine is about to be taken away."""


class TrackerThread:
    """One tracker, on a thread of its own."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        folder: Path,
        knobs: Mapping[str, Any],
        say: Callable[[str], None],
        *,
        again_s: float = AGAIN_S,
        late_s: float = LATE_S,
    ) -> None:
        """folder: the run's. say: may be called from any thread."""
        self.name, self._make, self._folder, self._knobs = name, make, folder, knobs
        self._say, self._again_s, self._late_s = say, again_s, late_s
        self._file = folder / FOLDER / f"{name}.json"
        state = known(self._file)
        self._id: str = state.get("id", "")
        self.step: int = state.get("step", -1)
        """The last one that it was told of."""
        self._lines: int = state.get("lines", 1)
        """How many lines of that step."""
        self._events: int = state.get("events", 0)
        """How many of the lines it was told of."""
        self._tracker: Tracker | None = None
        self._made: Tracker | None = None
        """The same, before it is open."""
        self._steps, self._happened = Tail(folder / "metrics.jsonl"), Tail(folder / "events.jsonl")
        self._read: tuple[int, list[dict[str, Any]]] = (-1, [])
        """The last step in `metrics.jsonl` so far, and its lines."""
        self._passed = 0
        """Events read so far."""
        self._wake, self.done = threading.Event(), threading.Event()
        self._end: End | None = None
        self._since, self._failures, self._late = 0.0, 0, False
        self._not_before = 0.0
        self._wake.set()
        self._thread = threading.Thread(target=self._run, name=f"keel-{name}", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Something has been written. Returns at once."""
        self._wake.set()
        since = self._since
        if since and not self._late and time.monotonic() - since > self._late_s:
            self._late = True
            self._say(
                f"warning: {self.name} has not answered for {self._late_s:.0f} s. The run goes on; "
                f"what it was not told is in {self._folder}.{self._cure}"
            )

    def close(self, end: End) -> None:
        """Have it send the rest; `done` says when that is over."""
        self._end = end
        self._wake.set()

    @property
    def _cure(self) -> str:
        return f" {self._made.cure}" if self._made is not None else ""

    def abandon(self) -> None:
        """It is waited for no longer, and has no more to say."""
        self._say = lambda _: None
        self._thread.name = f"{GIVEN_UP}{self.name}"
        if self._made is not None:
            self._made.abandon()

    def _run(self) -> None:
        while not self.done.is_set():
            self._wake.wait()
            self._wake.clear()
            # After a failure nothing but the end, which is tried in any case, is tried at once.
            if self._end is None and time.monotonic() < self._not_before:
                continue
            end, self._since = self._end, time.monotonic()
            try:
                self._send()
                if end is not None and self._tracker is not None:
                    self._tracker.close(end)
            except (Exception, SystemExit) as error:  # a package's; the run is none of its business
                self._failed(error)
            else:
                if self._failures or self._late:
                    self._say(f"{self.name} has caught up with the run")
                self._failures, self._late = 0, False
            self._since = 0.0
            if end is not None:
                self.done.set()

    def _send(self) -> None:
        if self._tracker is None:
            tracker = self._made = self._make()
            run = Tracked(
                folder=self._folder,
                name=self._folder.resolve().name,
                id=self._id,
                knobs=self._knobs,
            )
            opened: Opened = tracker.open(run)
            self._tracker, self._id = tracker, opened.id
            self._keep()
            self._say(f"{self.name}: {without_keys(opened.where)}")
        for line in self._steps.unread():
            step, at = line.pop("step"), line.pop("time")
            before = self._read[1] if self._read[0] == step else []
            if (step, len(before) + 1) > (self.step, self._lines):
                told = {name for each in before for name in each}
                fresh = {name: of for name, of in line.items() if name not in told}
                self._tracker.log(step, at, fresh)
                self.step, self._lines, self._since = step, len(before) + 1, time.monotonic()
                self._keep()
            self._read = step, [*before, line]
            self._steps.passed()
        for line in self._happened.unread():
            if self._passed >= self._events:
                if line["kind"] != OWN:
                    self._tracker.event(line["step"], line["time"], line["kind"], line["text"])
                self._events, self._since = self._passed + 1, time.monotonic()
                self._keep()
            self._passed += 1
            self._happened.passed()

    def _failed(self, error: BaseException) -> None:
        """Said once, until it works again."""
        again = min(self._again_s * 2 ** min(self._failures, 16), AGAIN_MOST_S)
        self._not_before, self._failures = time.monotonic() + again, self._failures + 1
        if self._failures == 1:
            text = " ".join(without_keys(f"{type(error).__name__}: {error}").split())
            self._say(
                f"warning: {self.name}: {text}. The run goes on; {self.name} is tried again, and "
                f"told then what it has missed.{self._cure}"
            )

    def _keep(self) -> None:
        self._file.parent.mkdir(exist_ok=True)
        state = {
            "id": self._id,
            "step": self.step,
            "lines": self._lines,
            "events": self._events,
        }
        fresh = self._file.with_suffix(".tmp")
        fresh.write_text(json.dumps(state))
        fresh.replace(self._file)


def has_abandoned_threads() -> bool:
    """Whether a thread is still at what it was given up for. The interpreter's own end may then be
    an abort, in the middle of what the package is at."""
    return any(thread.name.startswith(GIVEN_UP) for thread in threading.enumerate())


def known(path: Path) -> dict[str, Any]:
    """What `_keep` has written; nothing where it is not there or damaged: it begins anew."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return {}


class Tail:
    """The lines of a file of JSON that is being written."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._next = path, 0, 0

    def unread(self) -> Iterator[dict[str, Any]]:
        """Whole lines after the last one that was `passed`, one by one."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._next = self._at + len(line)
                try:
                    found = json.loads(line)
                except ValueError:  # half of it: the disk was full, or the power gone
                    self.passed()
                    continue
                yield found

    def passed(self) -> None:
        """The line is dealt with."""
        self._at = self._next


class Trackers:
    """All that `run.trackers` names."""

    def __init__(self, sendings: Sequence[TrackerThread], say: Callable[[str], None]) -> None:
        self._sendings, self._say = sendings, say

    def look(self) -> None:
        for sending in self._sendings:
            sending.look()

    def close(self, end: End, step: int, seconds: float = CLOSE_S) -> None:
        """step: the last one of the run. Returns after `seconds`, whatever is not sent by then."""
        for sending in self._sendings:
            sending.close(end)
        until = time.monotonic() + seconds
        for sending in self._sendings:
            ended = sending.done.wait(max(0.0, until - time.monotonic()))
            if not ended:
                sending.abandon()
            if not ended or sending.step < step:
                late = "" if ended else f" within {seconds:.0f} s"
                self._say(
                    f"warning: {sending.name} was told of {max(sending.step, 0)} of {step} "
                    f"steps{late}; when the run is resumed it is told of the rest, which stands "
                    "in metrics.jsonl"
                )
