"""Shows the progress of long waits: a live line on a terminal, and plain lines elsewhere.

Without a terminal, a line is printed after one second, every 30 seconds, and at the end. The
remaining time is estimated from a count (steps, bytes, prompts), or from how long the same wait
took last time on this machine.

The module uses only the standard library until there is a terminal, and works without rich, because
`make install` runs it in an empty environment.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from keel.trainer.run.signals import outliving

_FIRST_LINE_S, _LINE_EVERY_S = 1.0, 30.0
_POLL_S = 0.2
_MIN_COUNTED_S = 2.0
"""Seconds before which a count gives no estimate of the remaining time."""
REMEMBERED = 300
"""Number of durations that the cache file keeps, newest first."""


class Wait:
    """A long wait whose progress is shown. Its fields may be set from any thread."""

    def __init__(
        self,
        what: str,
        *,
        total: float = 0,
        unit: str = "",
        last_s: float | None = None,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total` is the number of `unit`s, or 0 if unknown, and `last_s` is how long the same wait
        took last time. With `quiet`, plain lines are printed only every 30 seconds."""
        self.what, self.total, self.unit, self.last_s = what, total, unit, last_s
        self.quiet = quiet
        self.done, self.before, self.note = 0.0, 0.0, ""
        """Units done so far, units done before the wait began, and a remark."""
        self.measure: Callable[[Wait], object] | None = None
        """Called before each display to update the fields above."""
        self._clock, self._began = clock, clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    def remaining(self) -> float | None:
        """Return the estimated number of seconds that remain, or None if unknown."""
        if self.total and self.before < self.done < self.total and self.seconds >= _MIN_COUNTED_S:
            return self.seconds / (self.done - self.before) * (self.total - self.done)
        if self.last_s is not None and self.seconds < self.last_s:
            return self.last_s - self.seconds
        return None

    def text(self) -> str:
        """Format the progress, such as `evaluating · 12 of 256 prompts · 4 s, about 80 s left`."""
        if self.measure is not None:
            self.measure(self)
        counted = [amount(self.done, self.total, self.unit)] if self.total else []
        remaining, spent = self.remaining(), duration(self.seconds)
        if remaining is not None:
            spent += f", about {duration(remaining)} left"
        elif self.last_s is not None:
            spent += f" (last time {duration(self.last_s)})"
        return " · ".join([self.what, *counted, *filter(None, [self.note]), spent])


def amount(done: float, total: float, unit: str) -> str:
    """Format a count, such as `3 of 8 prompts`. Bytes are shown in GB of 1e9 bytes."""
    if unit == "bytes":
        return f"{done / 1e9:.1f} of {total / 1e9:.1f} GB"
    return f"{done:,.0f} of {total:,.0f} {unit}"


def duration(seconds: float) -> str:
    """Format a duration as `45 s`, `12 min` or `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


@contextmanager
def waiting(what: str, key: str = "", *, total: float = 0, unit: str = "") -> Iterator[Wait]:
    """Show progress while the block runs. `key` is the name under which its duration is
    remembered."""
    wait = Wait(what, total=total, unit=unit, last_s=_MEMORY.last(key) if key else None)
    DISPLAY.begin(wait)
    try:
        yield wait
    except BaseException:
        DISPLAY.end(wait, completed=False)
        raise
    DISPLAY.end(wait)
    if key:
        _MEMORY.keep(key, wait.seconds)


class Display:
    """Shows the progress of the innermost open wait."""

    def __init__(self, *, poll_s: float = _POLL_S) -> None:
        self._poll_s = poll_s
        self._open: list[Wait] = []
        self._printed: dict[Wait, float] = {}
        """For each wait, the elapsed seconds when its last line was printed."""
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._live: Any = None

    def begin(self, wait: Wait) -> None:
        with self._lock:
            self._open.append(wait)
            if len(self._open) > 1:
                return
            self._live = _open_live(self._text) if sys.stdout.isatty() else None
            if self._live is None:
                self._closed = threading.Event()
                threading.Thread(target=self._run, args=(self._closed,), daemon=True).start()

    def end(self, wait: Wait, *, completed: bool = True) -> None:
        with self._lock:
            if wait not in self._open:
                return
            self._open.remove(wait)
            if self._printed.pop(wait, None) is not None and completed and not wait.quiet:
                self._print(f"{wait.what}: took {duration(wait.seconds)}")
            live, self._live = self._live, self._live if self._open else None
            if not self._open:
                self._closed.set()
        if live is not None and self._live is None:
            live.stop()  # waits for its thread, which may need the lock

    def _text(self) -> str:
        with self._lock:
            return self._open[-1].text() if self._open else ""

    def _run(self, closed: threading.Event) -> None:
        while not closed.wait(self._poll_s):
            with self._lock:
                if closed.is_set() or not self._open:
                    return
                wait = self._open[-1]
                now = wait.seconds
                first = wait not in self._printed and not wait.quiet
                if first and now >= _FIRST_LINE_S:
                    last = f" (last time {duration(wait.last_s)})" if wait.last_s else ""
                    counted = f": {amount(wait.done, wait.total, wait.unit)}" if wait.total else ""
                    self._print(f"{wait.what}{counted}{last} …")
                elif not first and now - self._printed.get(wait, 0.0) >= _LINE_EVERY_S:
                    self._print(wait.text())
                else:
                    continue
                self._printed[wait] = now

    def _print(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the reader is gone
            print(text, flush=True)


def _open_live(text: Callable[[], str]) -> Any:
    """Start a live line at the bottom of the terminal. Returns None if rich is not installed."""
    try:
        from rich.console import Console  # noqa: PLC0415  (see above)
        from rich.live import Live  # noqa: PLC0415
        from rich.spinner import Spinner  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415
    except ImportError:
        return None
    spinner = Spinner("dots")

    def draw() -> Spinner:
        spinner.update(text=Text(text(), no_wrap=True, overflow="ellipsis"))
        return spinner

    console = Console(file=outliving(sys.stdout))
    live = Live(console=console, get_renderable=draw, refresh_per_second=5, transient=True)
    live.start()
    return live


class DurationCache:
    """Stores the durations of earlier waits in the user's cache folder."""

    def __init__(self, path: Callable[[], Path]) -> None:
        self._path = path

    def last(self, key: str) -> float | None:
        return self._read().get(key)

    def keep(self, key: str, seconds: float) -> None:
        path, durations = self._path(), self._read()
        durations.pop(key, None)
        durations[key] = round(seconds, 1)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.tmp")
            partial.write_text(json.dumps(dict(list(durations.items())[-REMEMBERED:]), indent=0))
            partial.replace(path)

    def _read(self) -> dict[str, float]:
        with suppress(OSError, ValueError):
            content = json.loads(self._path().read_text())
            if isinstance(content, dict):
                return {k: v for k, v in content.items() if isinstance(v, int | float)}
        return {}


def _cache_file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "keel" / "waits.json"


DISPLAY, _MEMORY = Display(), DurationCache(_cache_file)
