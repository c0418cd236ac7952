"""Handle signals that stop a command, and keep output working without a terminal or reader.

Ctrl-C            first: stop after the current step, with a checkpoint; second: stop at once
SIGTERM, SIGHUP,  preemption (scheduler, `ray job stop`, Slurm warning) or a closed terminal: drop
SIGUSR1           rollouts in flight, finish the optimizer step and save a checkpoint, all within
                  `run.grace_s`

This module uses only the standard library, because `watching` is active while a command loads its
libraries.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self, TextIO, cast

from keel.rl.supervisor import PREEMPTION

FAILED, REFUSED, INTERRUPTED, PREEMPTED = 1, 2, 130, 143
"""Exit statuses of a command: it failed while running, the recipe or data is invalid, Ctrl-C before
the start or a second Ctrl-C, and a preemption signal. After `PREEMPTED`, rerun it to resume."""
FIRST = "Stopping after this step, with a checkpoint. Press Ctrl-C again to stop at once."
NOTHING_YET = "Stopping. Nothing is trained yet, so there is nothing to save."
_PREEMPTED_FIRST = "{signal}: dropping the current rollouts; a checkpoint follows"
_SLACK_S = 0.1
"""Extra seconds for timers, which can fire slightly early as measured by `time.monotonic`."""


class Preempted(KeyboardInterrupt):
    """Raised after a preemption signal if there is nothing to save or no time left to save it."""


@dataclass(slots=True)
class _State:
    preempted: signal.Signals | None = None  # the first preemption signal that was received
    overdue: str = ""  # text to append to the signal's name if `run.grace_s` was exceeded
    interrupted: bool = False  # True once Ctrl-C has been pressed
    open: Interrupt | None = None
    """The active `Interrupt`, if any. It keeps signals from ending the command."""
    deferred: list[int] | None = None  # the signals received during `signals_deferred`
    terminals: list[TextIO] = field(default_factory=list)
    previous: dict[int, Any] = field(default_factory=dict)
    """The handler that each signal had before `watching`."""


_STATE = _State()


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _STATE.deferred is not None:
        _STATE.deferred.append(number)
    else:
        _handle(number)


def _handle(number: int) -> None:
    interrupt = _STATE.open
    if number == signal.SIGINT:
        _STATE.interrupted = True
        if interrupt is None or interrupt.stopping:
            raise KeyboardInterrupt
        interrupt.stop(interrupt.first if isinstance(interrupt.first, str) else interrupt.first())
    elif _STATE.preempted is not None:  # schedulers repeat signals
        if interrupt is not None and time.monotonic() >= interrupt.deadline:
            _STATE.overdue = f", and not done within run.grace_s = {interrupt.grace_s:g} s"
            raise Preempted
    else:
        _STATE.preempted = signal.Signals(number)
        if number == signal.SIGHUP:
            for stream in _STATE.terminals:
                if not stream.isatty():
                    _discard_output(stream)
        if interrupt is None:
            raise Preempted
        interrupt.stop(interrupt.preempted_first.format(signal=_STATE.preempted.name))
        interrupt.start_timer()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def watching() -> Iterator[None]:
    """Raise `Preempted` if a preemption signal arrives in the main thread inside the `with` block,
    unless an open `Interrupt` handles it. Under `nohup`, SIGHUP stays ignored."""
    if not _in_main_thread() or _STATE.previous:
        yield
        return
    for number in (signal.SIGINT, *PREEMPTION):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            _STATE.previous[number] = signal.signal(number, _on_signal)
    # Recorded now, since `isatty` is false once the terminal is gone.
    _STATE.terminals = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]
    try:
        yield
    finally:
        for number, handler in _STATE.previous.items():
            signal.signal(number, handler)
        _STATE.previous.clear()
        _STATE.preempted, _STATE.overdue, _STATE.interrupted = None, "", False


def fix_exit_status(status: int) -> None:
    """Make any further signal, such as another Ctrl-C, exit the process immediately with this
    status."""

    def leave(number: int, frame: FrameType | None) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, RuntimeError, ValueError):
                stream.flush()
        os._exit(status)

    for number in (signal.SIGINT, *PREEMPTION) if _in_main_thread() else ():
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, leave)


def preemption_signal() -> str:
    """Return the name of the preemption signal that is ending this command, or "". Use this rather
    than catching `Preempted`, which Ray can turn into a plain KeyboardInterrupt."""
    return f"{_STATE.preempted.name}{_STATE.overdue}" if _STATE.preempted else ""


def stop_requested() -> bool:
    return _STATE.interrupted


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block preemption signals in processes started inside the `with` block. Schedulers signal
    every process in a job, but Ray and the trainer must stay alive until the checkpoint is saved.
    On exit, restore Keel's handlers if libraries have replaced them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION)
    try:
        yield
    finally:
        for number in _STATE.previous if _in_main_thread() else ():
            signal.signal(number, _on_signal)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Delay handling of all signals until the `with` block ends."""
    if not _in_main_thread() or _STATE.deferred is not None:
        yield
        return
    _STATE.deferred = []
    try:
        yield
    finally:
        numbers, _STATE.deferred = _STATE.deferred, None
        with ExitStack() as stack:  # handles all of them even if the first raises
            for number in reversed(numbers):
                stack.callback(_handle, number)


class Interrupt:
    """Turns signals into requests to stop while it is open. Otherwise, a signal would end the
    command immediately."""

    def __init__(
        self,
        say: Callable[[str], None],
        first: str | Callable[[], str] = FIRST,
        *,
        preempted_first: str = _PREEMPTED_FIRST,
        grace_s: float = 0.0,
    ) -> None:
        """`first` is printed after Ctrl-C and `preempted_first` after a preemption. `Preempted` is
        raised `grace_s` seconds after a preemption, or never if `grace_s` is 0."""
        self._say, self.first, self.preempted_first = say, first, preempted_first
        self.stopping, self.grace_s, self.deadline = False, grace_s, float("inf")
        self._timer: threading.Timer | None = None

    def __call__(self) -> bool:
        return self.stopping

    def should_abort(self) -> bool:
        """Return True if there is only enough time left to save a checkpoint."""
        return _STATE.preempted is not None

    def stop(self, text: str) -> None:
        self.stopping = True
        # The signal may arrive in the middle of a write, or with the end of the reader.
        with suppress(OSError, RuntimeError):
            self._say(text)

    def start_timer(self) -> None:
        main = threading.main_thread().ident
        if self.grace_s and main is not None:
            self.deadline = time.monotonic() + self.grace_s
            wait_s, again = self.grace_s + _SLACK_S, (main, signal.SIGTERM)
            self._timer = threading.Timer(wait_s, signal.pthread_kill, again)
            self._timer.daemon = True
            self._timer.start()

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self._stack.enter_context(watching())
        if self.should_abort():  # raised earlier, but swallowed by a destructor
            self._stack.close()
            raise Preempted
        _STATE.open = self
        return self

    def __exit__(self, *_: object) -> None:
        _STATE.open = None
        if self._timer is not None:
            self._timer.cancel()
        self._stack.close()


def _discard_output(stream: TextIO) -> None:
    with suppress(OSError, ValueError), open(os.devnull, "w") as null:
        os.dup2(null.fileno(), stream.fileno())


class _OutlivingStream:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN):  # may have room again
                raise
            _discard_output(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_writable(stream: TextIO | None) -> TextIO:
    """Wrap a stream so that writing to it still works once its reader is gone. `stream` is None if
    the stream is closed (`>&-`)."""
    return cast(TextIO, _OutlivingStream(stream or open(os.devnull, "w")))


def print_line(text: str, stream: TextIO | None = None) -> None:
    with suppress(OSError):
        print(text, file=keep_writable(stream or sys.stdout), flush=True)
