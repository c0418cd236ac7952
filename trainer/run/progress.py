"""Show the progress of long waits as a live line on a terminal, and as plain lines elsewhere.

Plain lines are printed after one second and then every 30 seconds.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from keel.trainer.run.signals import keep_writable

_FIRST_LINE_S, _LINE_EVERY_S, _POLL_S = 1.0, 30.0, 0.2
_MIN_COUNTED_S = 2.0  # the remaining time is estimated only after this many seconds


class Wait:
    """A long wait with a progress display. Its fields can be set from any thread."""

    def __init__(self, what: str, *, total: float = 0, unit: str = "", quiet: bool = False) -> None:
        """Start a wait. `total` is the number of units to wait for (0 if unknown). `unit` is the
        plural name of the units, such as `prompts`. With `quiet`, plain lines are printed only
        every 30 seconds."""
        self.what, self.total, self.unit, self.quiet = what, total, unit, quiet
        self.done, self.before, self.note = 0.0, 0.0, ""
        """The units done so far, the units done before the wait began, and a comment to show."""
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def text(self) -> str:
        """Format the progress, such as `evaluating · 12 of 256 prompts · 4 s, about 80 s left`."""
        spent = format_duration(self.seconds)
        if self.before < self.done < self.total and self.seconds >= _MIN_COUNTED_S:
            remaining = self.seconds / (self.done - self.before) * (self.total - self.done)
            spent += f", about {format_duration(remaining)} left"
        counted = format_amount(self.done, self.total, self.unit) if self.total else ""
        return " · ".join(filter(None, [self.what, counted, self.note, spent]))


def format_amount(done: float, total: float, unit: str) -> str:
    """Format progress, such as `3 of 8 prompts`."""
    return f"{done:,.0f} of {total:,.0f} {unit}"


def format_duration(seconds: float) -> str:
    """Format a duration as `45 s`, `12 min` or `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


@contextmanager
def waiting(what: str, *, total: float = 0, unit: str = "") -> Iterator[Wait]:
    wait = Wait(what, total=total, unit=unit)
    DISPLAY.begin(wait)
    try:
        yield wait
    finally:
        DISPLAY.end(wait)


class _Display:
    """Shows the progress of the current wait, which is the innermost one if waits are nested."""

    def __init__(self) -> None:
        self._open: list[Wait] = []
        self._printed: dict[Wait, float] = {}
        """Maps each wait to its elapsed seconds when its last line was printed."""
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._live: Any = None

    def begin(self, wait: Wait) -> None:
        with self._lock:
            self._open.append(wait)
            if len(self._open) > 1:
                return
            self._live = self._open_live() if sys.stdout.isatty() else None
            if self._live is None:
                self._closed = threading.Event()
                threading.Thread(target=self._run, args=(self._closed,), daemon=True).start()

    def end(self, wait: Wait) -> None:
        with self._lock:
            if wait not in self._open:
                return
            self._open.remove(wait)
            self._printed.pop(wait, None)
            live, self._live = self._live, self._live if self._open else None
            if not self._open:
                self._closed.set()
        if live is not None and self._live is None:
            live.stop()  # waits for its thread, which may need the lock

    def _run(self, closed: threading.Event) -> None:
        while not closed.wait(_POLL_S):
            with self._lock:
                if closed.is_set() or not self._open:
                    return
                wait = self._open[-1]
                now, first = wait.seconds, wait not in self._printed and not wait.quiet
                since = now - self._printed.get(wait, 0.0)
                if since >= (_FIRST_LINE_S if first else _LINE_EVERY_S):
                    with suppress(OSError, ValueError):  # the reader is gone
                        print(f"{wait.what} …" if first else wait.text(), flush=True)
                    self._printed[wait] = now

    def _open_live(self) -> Any:
        from rich.console import Console  # noqa: PLC0415  (only on a terminal)
        from rich.live import Live  # noqa: PLC0415
        from rich.spinner import Spinner  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        spinner = Spinner("dots")

        def draw() -> Spinner:
            with self._lock:
                line = self._open[-1].text() if self._open else ""
            spinner.update(text=Text(line, no_wrap=True, overflow="ellipsis"))
            return spinner

        console = Console(file=keep_writable(sys.stdout))
        live = Live(console=console, get_renderable=draw, refresh_per_second=5, transient=True)
        live.start()
        return live


DISPLAY = _Display()
