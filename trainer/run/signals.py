"""Signals that stop a command, and output that survives a lost terminal or reader.

Ctrl-C            first: stop after the current step, with a checkpoint; second: stop at once
SIGTERM, SIGHUP,  preemption (scheduler, `ray job stop`, Slurm warning) or a closed terminal: drop
SIGUSR1           rollouts in flight, finish the optimizer step and save a checkpoint, all within
                  `run.grace_s`

Uses the standard library only, because `watching` is active while a command loads its libraries.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, Self, TextIO, cast

PREEMPTION = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PREEMPTED = 143
"""Exit status after any of these signals: 128 + SIGTERM."""
FIRST = "Stopping after this step, with a checkpoint. Press Ctrl-C again to stop at once."
NOTHING_YET = "Stopping. Nothing is trained yet, so there is nothing to save."
PREEMPTED_FIRST = "{signal}: dropping the current rollouts; a checkpoint follows"
SLACK_S = 0.1
"""Seconds added to timers, because they may fire slightly before `time.monotonic` agrees."""


class Preempted(KeyboardInterrupt):
    """Raised after a signal of `PREEMPTION` if there is nothing to save or the time is up."""


class _Signals:
    """Signal state of this process. There is only one instance, since handlers belong to the
    process."""

    def __init__(self) -> None:
        self.preempted: signal.Signals | None = None
        """The first signal of `PREEMPTION` that was received."""
        self.overdue = ""
        """Note that is added to `preempted` if `run.grace_s` was exceeded."""
        self.interrupted = False
        """True if Ctrl-C was pressed."""
        self.open: Interrupt | None = None
        """The open `Interrupt`, which receives signals so that they do not end the command."""
        self.deferred: list[int] | None = None
        """Signals that were received within `signals_deferred`."""
        self._terminals: list[TextIO] = []
        self._previous: dict[int, Any] = {}
        """Maps each signal to the handler that it had before `install`."""
        self._previous_hook: Any = None
        self._resend: threading.Timer | None = None
        """Sends the signal again if Python has swallowed a `Preempted`."""

    def install(self) -> None:
        """Install the handlers, which works only in the main thread. SIGHUP stays ignored under
        `nohup`."""
        for number in (signal.SIGINT, *PREEMPTION):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        # Recorded now, since `isatty` is false once the terminal is gone.
        self._terminals = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]
        self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable

    def reinstall(self) -> None:
        """Install our handlers again after a library has replaced them."""
        for number in self._previous:
            signal.signal(number, self._on_signal)

    def restore(self) -> None:
        self.cancel_resend()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        if sys.unraisablehook == self._on_unraisable:
            sys.unraisablehook = self._previous_hook
        self._terminals = []
        self.preempted, self.overdue, self.interrupted = None, "", False

    @property
    def installed(self) -> bool:
        return bool(self._previous)

    def _on_unraisable(self, unraisable: Any) -> None:
        """Send the signal again if Python has swallowed `Preempted`, as it does with exceptions in
        destructors and weak-reference callbacks."""
        if isinstance(unraisable.exc_value, Preempted):
            self._resend = _send_later(SLACK_S)
        else:
            self._previous_hook(unraisable)

    def cancel_resend(self) -> bool:
        """Cancel the repeated signal. Returns True if Python had swallowed a `Preempted`."""
        timer, self._resend = self._resend, None
        if timer is not None:
            timer.cancel()
        return timer is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.deferred is not None:
            self.deferred.append(number)
        else:
            self.handle(number)

    def handle(self, number: int) -> None:
        """Pass the signal to the open `Interrupt`, or raise if there is none."""
        if number == signal.SIGINT:
            self.interrupted = True
            if self.open is None or self.open.stopping:
                raise KeyboardInterrupt
            first = self.open.first
            self.open.stop(first if isinstance(first, str) else first())
        elif self.preempted is not None:  # schedulers repeat signals
            swallowed = self.cancel_resend()
            if self.open is not None and self.open.out_of_time:
                self.overdue = f", and not done within run.grace_s = {self.open.grace_s:g} s"
                raise Preempted
            if self.open is None and swallowed:
                raise Preempted
        else:
            self.preempted = signal.Signals(number)
            if number == signal.SIGHUP:
                for stream in self._terminals:
                    if not stream.isatty():
                        _discard_output(stream)
            if self.open is None:
                raise Preempted
            self.open.stop(self.open.preempted_first.format(signal=self.preempted.name))
            self.open.start_timer()


_SIGNALS = _Signals()


def _send_later(seconds: float) -> threading.Timer:
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGTERM))
    timer.daemon = True
    timer.start()
    return timer


@contextmanager
def watching() -> Iterator[None]:
    """While the block runs, raise `Preempted` on a signal of `PREEMPTION`, unless an `Interrupt` is
    open.

    Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread() or _SIGNALS.installed:
        yield
        return
    _SIGNALS.install()
    try:
        yield
    finally:
        _SIGNALS.restore()


_exit_status: list[int] = []


def fix_exit_status(status: int) -> None:
    """From now on, exit with `status` as soon as a signal arrives.

    Call this before the last output of a process, because users may press Ctrl-C again after they
    see it.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    _exit_status[:] = [status]
    for number in (signal.SIGINT, *PREEMPTION):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _exit_on_signal)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, RuntimeError, ValueError):
            stream.flush()
    os._exit(_exit_status[0])


@atexit.register
def _ignore_signals() -> None:
    """Ignore signals at exit. Python drops its handlers afterwards, so a late signal would change
    the exit status."""
    for number in (signal.SIGINT, *PREEMPTION):
        if signal.getsignal(number) is _exit_on_signal:
            signal.signal(number, signal.SIG_IGN)


def preempted() -> str:
    """Return the name of the signal that is ending this command, or an empty string.

    Use this instead of catching `Preempted`, which Ray turns into a plain KeyboardInterrupt.
    """
    return f"{_SIGNALS.preempted.name}{_SIGNALS.overdue}" if _SIGNALS.preempted else ""


def stop_requested() -> bool:
    """Return True once Ctrl-C was pressed."""
    return _SIGNALS.interrupted


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Start processes in this block that never receive `PREEMPTION`, and neither do their children.

    Schedulers signal every process of a job, but Ray and the trainer have to live a little longer
    for the checkpoint. When the block ends, pending signals are handled, and handlers that
    libraries have installed are replaced with ours.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            _SIGNALS.reinstall()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Run a block that must not be interrupted. All signals, including Ctrl-C, are handled when it
    ends."""
    here = threading.current_thread() is threading.main_thread()
    if not here or _SIGNALS.deferred is not None:
        yield
        return
    _SIGNALS.deferred = []
    try:
        yield
    finally:
        numbers, _SIGNALS.deferred = _SIGNALS.deferred, None
        with ExitStack() as stack:  # handles all of them even if the first raises
            for number in reversed(numbers):
                stack.callback(_SIGNALS.handle, number)


class Interrupt:
    """While this is open, signals request a stop and do not end the command. It works only in the
    main thread."""

    def __init__(
        self,
        say: Callable[[str], None],
        first: str | Callable[[], str] = FIRST,
        *,
        preempted_first: str = PREEMPTED_FIRST,
        grace_s: float = 0.0,
    ) -> None:
        """`first` and `preempted_first` are the messages after Ctrl-C and after a preemption.

        `grace_s` is the number of seconds from a preemption until `Preempted` is raised in the main
        thread; with 0 it is never raised.
        """
        self._say, self.first, self.preempted_first = say, first, preempted_first
        self.stopping = False
        self.grace_s, self._deadline = grace_s, float("inf")
        self._timer: threading.Timer | None = None

    def __call__(self) -> bool:
        return self.stopping

    def should_abort(self) -> bool:
        """Return True if there is only enough time left for a checkpoint."""
        return _SIGNALS.preempted is not None

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() >= self._deadline

    def stop(self, text: str) -> None:
        self.stopping = True
        # The signal may arrive in the middle of a write, or with the end of the reader.
        with suppress(OSError, RuntimeError):
            self._say(text)

    def start_timer(self) -> None:
        if self.grace_s:
            self._deadline = time.monotonic() + self.grace_s
            self._timer = _send_later(self.grace_s + SLACK_S)

    def __enter__(self) -> Self:
        self._watching = watching()
        self._watching.__enter__()
        _SIGNALS.open = self
        if self.should_abort():  # raised earlier, but swallowed
            _SIGNALS.cancel_resend()
            self.__exit__()
            raise Preempted
        return self

    def __exit__(self, *_: object) -> None:
        _SIGNALS.open = None
        if self._timer is not None:
            self._timer.cancel()
        self._watching.__exit__(None, None, None)


def _discard_output(stream: TextIO) -> None:
    """Redirect a stream to /dev/null after its terminal or reader has gone away."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as null:
        os.dup2(null.fileno(), stream.fileno())


class _OutlivingStream:
    """The stream wrapper that `outliving` returns."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._failed(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN):  # may have room again
            raise error
        _discard_output(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outliving(stream: TextIO | None) -> TextIO:
    """Wrap a stream so that writing never fails after its terminal or reader has gone away.

    Pass None for a stream that was closed before this process began (`>&-`).
    """
    return cast(TextIO, _OutlivingStream(stream or open(os.devnull, "w")))


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line to an `outliving` stream; a full disk holds it back."""
    with suppress(OSError):
        print(text, file=outliving(stream or sys.stdout), flush=True)
