"""What is being waited for, since when, and how long still.

On a terminal: one line, redrawn in place. Elsewhere: a line once a wait has lasted a second, one
every half a minute, and one at its end. How long still is judged by a count (steps, bytes,
prompts), else by how long the same took last on this machine, which a small file in the user's
cache folder remembers. Standard library alone: it is there before anything else is loaded or even
installed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

BRIEF_S, SAY_S = 1.0, 30.0
"""Without a terminal: what is over sooner is not mentioned; between two lines about one wait."""
DRAW_S = 0.2
SOON_S = 2.0
"""A count says nothing of the time left before."""
REMEMBERED = 300
"""Waits that the file holds, the newest ones."""
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
Clock = Callable[[], float]


class Wait:
    """One of them. Its fields may be set from any thread."""

    def __init__(
        self,
        what: str,
        *,
        total: float = 0,
        unit: str = "",
        last_s: float | None = None,
        quiet: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        """total: of `unit`s, where they can be counted. last_s: what it took the last time. quiet:
        without a terminal it is mentioned only once it lasts long."""
        self.what, self.total, self.unit, self.last_s = what, total, unit, last_s
        self.quiet = quiet
        self.done, self.note, self.before = 0.0, "", 0.0
        """How many of the total; what else there is to say of it now; how many were done before it
        began, which say nothing of its speed."""
        self.measure: Callable[[Wait], object] | None = None
        """Called before it is shown, to bring the two up to date."""
        self._clock, self._began = clock, clock()

    @property
    def seconds(self) -> float:
        """So far."""
        return self._clock() - self._began

    def left(self) -> float | None:
        """Seconds; None where nobody knows, or it takes longer than the last time."""
        if self.total and self.before < self.done < self.total and self.seconds >= SOON_S:
            return self.seconds / (self.done - self.before) * (self.total - self.done)
        if self.last_s is not None and self.seconds < self.last_s:
            return self.last_s - self.seconds
        return None

    def words(self) -> str:
        """`evaluating · 12 of 256 prompts · 4 s, about 80 s left`."""
        if self.measure is not None:
            self.measure(self)
        counted = [f"{amount(self.done, self.total, self.unit)}"] if self.total else []
        left, said = self.left(), duration(self.seconds)
        if left is not None:
            said += f", about {duration(left)} left"
        elif self.last_s is not None:
            said += f" (last time {duration(self.last_s)})"
        return " · ".join([self.what, *counted, *filter(None, [self.note]), said])


def amount(done: float, total: float, unit: str) -> str:
    """`3 of 8 prompts`; bytes in GB, of 1e9."""
    if unit == "bytes":
        return f"{done / 1e9:.1f} of {total / 1e9:.1f} GB"
    return f"{done:,.0f} of {total:,.0f} {unit}"


def duration(seconds: float) -> str:
    """Such as `45 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


@contextmanager
def waiting(what: str, key: str = "", *, total: float = 0, unit: str = "") -> Iterator[Wait]:
    """Show what goes on inside. key: what makes it the same wait as another time, without which
    nothing is remembered."""
    wait = Wait(what, total=total, unit=unit, last_s=MEMORY.last(key) if key else None)
    DISPLAY.begin(wait)
    try:
        yield wait
    except BaseException:
        DISPLAY.end(wait, whole=False)
        raise
    DISPLAY.end(wait)
    if key:
        MEMORY.keep(key, wait.seconds)


class Display:
    """Shows the innermost of the waits that are open, by a thread that lives as long as any is."""

    def __init__(self, *, draw_s: float = DRAW_S) -> None:
        self._draw_s = draw_s
        self._open: list[Wait] = []
        self._said: dict[Wait, float] = {}
        """When a line was last printed about it; those of which none was are not there."""
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._line: _Line | None = None

    def begin(self, wait: Wait) -> None:
        with self._lock:
            self._open.append(wait)
            if len(self._open) > 1:
                return
            self._over = threading.Event()
            if sys.stdout.isatty():
                self._line = _Line(self._lock)
            ticks = threading.Thread(target=self._run, args=(self._over,), daemon=True)
            ticks.start()

    def end(self, wait: Wait, *, whole: bool = True) -> None:
        """whole: whether it has come to its end."""
        with self._lock:
            if wait not in self._open:
                return
            self._open.remove(wait)
            if self._said.pop(wait, None) is not None and whole and not wait.quiet:
                self._print(f"{wait.what}: took {duration(wait.seconds)}")
            if not self._open:
                self._over.set()
                if self._line is not None:
                    self._line.close()
                    self._line = None

    def _run(self, over: threading.Event) -> None:
        while not over.wait(self._draw_s):
            with self._lock:
                if over.is_set() or not self._open:
                    return
                wait = self._open[-1]
                if self._line is not None:
                    self._line.draw(wait.words())
                    continue
                now = wait.seconds
                if now < (SAY_S if wait.quiet else BRIEF_S):
                    continue
                if wait not in self._said and not wait.quiet:
                    self._print(begun(wait))
                elif now - self._said.get(wait, -SAY_S) >= SAY_S:
                    self._print(wait.words())
                else:
                    continue
                self._said[wait] = now

    def _print(self, text: str) -> None:
        with suppress(OSError, ValueError):  # who has read it is gone
            print(text, flush=True)


def begun(wait: Wait) -> str:
    """The first line about a wait."""
    known = f" (last time {duration(wait.last_s)})" if wait.last_s is not None else ""
    counted = f": {amount(wait.done, wait.total, wait.unit)}" if wait.total else ""
    return f"{wait.what}{counted}{known} …"


class _Line:
    """The last line of a terminal. What is printed meanwhile stands above it."""

    def __init__(self, lock: threading.RLock | Any) -> None:
        self.lock, self._turn, self._drawn = lock, 0, False
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Above(sys.stdout, self), _Above(sys.stderr, self)  # type: ignore[assignment]
        self._ours = sys.stdout, sys.stderr

    def draw(self, text: str) -> None:
        if any(stream.unfinished for stream in self._ours):
            return
        self._turn += 1
        room = shutil.get_terminal_size().columns - 1
        shown = f"{SPINNER[self._turn % len(SPINNER)]} {text}"
        self._write(f"\r\x1b[K{shown[:room]}")
        self._drawn = True

    def clear(self) -> None:
        if self._drawn:
            self._write("\r\x1b[K")
        self._drawn = False

    def close(self) -> None:
        self.clear()
        if sys.stdout is self._ours[0]:  # else somebody has put something over it
            sys.stdout = self._streams[0]
        if sys.stderr is self._ours[1]:
            sys.stderr = self._streams[1]

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone
            self._streams[0].write(text)
            self._streams[0].flush()


class _Above:
    """A stream that clears the line before it writes."""

    def __init__(self, stream: TextIO, line: _Line) -> None:
        self._stream, self._line, self.unfinished = stream, line, False

    def write(self, text: str) -> int:
        with self._line.lock:
            self._line.clear()
            if text:
                self.unfinished = not text.endswith("\n")
            return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Memory:
    """How long waits took, in a file of this user on this machine."""

    def __init__(self, path: Callable[[], Path]) -> None:
        self._path = path

    def last(self, key: str) -> float | None:
        return self._read().get(key)

    def keep(self, key: str, seconds: float) -> None:
        """A file that cannot be written is no trouble of a run's."""
        path, kept = self._path(), self._read()
        kept.pop(key, None)
        kept[key] = round(seconds, 1)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_suffix(f".{os.getpid()}.tmp")
            fresh.write_text(json.dumps(dict(list(kept.items())[-REMEMBERED:]), indent=0))
            fresh.replace(path)

    def _read(self) -> dict[str, float]:
        with suppress(OSError, ValueError):
            found = json.loads(self._path().read_text())
            if isinstance(found, dict):
                return {k: v for k, v in found.items() if isinstance(v, int | float)}
        return {}


def remembered() -> Path:
    """In `keel` under the user's cache folder (XDG base directories)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "keel" / "waits.json"


DISPLAY, MEMORY = Display(), Memory(remembered)
