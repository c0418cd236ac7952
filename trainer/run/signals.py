"""How a command is asked to end, and what it makes of that.

Ctrl-C            the first asks to stop after the step, with a checkpoint; the second stops at once
SIGTERM, SIGHUP,  the machine is about to be taken away (a scheduler, `ray job stop`, a warning of
SIGUSR1           Slurm's), or the terminal is gone: current rollouts are dropped, an optimizer
                  step under way may end, a checkpoint is written, all within `run.grace_s`

Imports nothing heavy: signals are heeded from a command's first moment on (`watching`), also while
it still loads its libraries.
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
"""Exit status of a command that one of them has ended, whichever it was: 128 + SIGTERM."""
FIRST = "Stopping after this step, with a checkpoint. Press Ctrl-C again to stop at once."
NOTHING_YET = "Stopping. Nothing is trained yet, so there is nothing to save."
SLACK_S = 0.1
"""Timers and clocks are not of one mind to the millisecond."""
PREEMPTED_FIRST = "{signal}: dropping the current rollouts; a checkpoint follows"


class Preempted(KeyboardInterrupt):
    """One of `PREEMPTION` came, and there is nothing to save, or no more time for it; or, from
    `keel.train`, all is saved."""


class _Signals:
    """What has come to this process: there is one of it, as there is of signal handlers."""

    def __init__(self) -> None:
        self.preempted: signal.Signals | None = None
        """The first of `PREEMPTION` that came."""
        self.late = ""
        """What was not done in time after it."""
        self.asked = False
        """Whether Ctrl-C has come."""
        self.open: Interrupt | None = None
        """Who is told, instead of the command being ended."""
        self.waiting: list[int] | None = None
        """What has come within `signals_deferred`."""
        self._terminals: list[TextIO] = []
        """Of what is written to: no `isatty` says so any more of one that is gone."""
        self._installed: dict[int, Any] = {}
        """What was there before, by signal."""
        self._unraisable: Any = None
        """What was there before."""
        self.swallowed: threading.Timer | None = None
        """Sends the signal again whose `Preempted` was raised where nobody could hear it."""

    def install(self) -> None:
        """Main thread only. SIGHUP stays ignored where `nohup` has it so."""
        for number in (signal.SIGINT, *PREEMPTION):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._installed[number] = signal.signal(number, self._on_signal)
        self._terminals = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._on_unraisable

    def again(self) -> None:
        """A library has put handlers of its own in their place."""
        for number in self._installed:
            signal.signal(number, self._on_signal)

    def restore(self) -> None:
        self.heard()
        for number, handler in self._installed.items():
            signal.signal(number, handler)
        self._installed.clear()
        if sys.unraisablehook == self._on_unraisable:
            sys.unraisablehook = self._unraisable
        self._terminals = []
        # The next command of this process, or a notebook's next run in a thread, was told nothing.
        self.preempted, self.late, self.asked = None, "", False

    @property
    def installed(self) -> bool:
        return bool(self._installed)

    def _on_unraisable(self, what: Any) -> None:
        """Python lets no exception out of a destructor, or a callback of a weak reference."""
        if isinstance(what.exc_value, Preempted):
            self.swallowed = later(SLACK_S)
        else:
            self._unraisable(what)

    def heard(self) -> bool:
        """Whether there was a `swallowed` one, which is raised now."""
        swallowed, self.swallowed = self.swallowed, None
        if swallowed is not None:
            swallowed.cancel()
        return swallowed is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.waiting is not None:
            self.waiting.append(number)
        else:
            self.heed(number)

    def heed(self, number: int) -> None:
        """Raises, or tells who is open."""
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            self.asked = True
            if self.open is None or self.open.asked:
                raise KeyboardInterrupt
            first = self.open.first
            self.open.ask(first if isinstance(first, str) else first())
        elif self.preempted is not None:  # schedulers repeat themselves
            again = self.heard()
            if self.open is not None and self.open.out_of_time:
                self.late = f", and not done within run.grace_s = {self.open.grace_s:g} s"
                raise Preempted
            if self.open is None and again:
                raise Preempted
        else:
            self.preempted = signal.Signals(number)
            if number == signal.SIGHUP:
                for stream in self._terminals:
                    if not stream.isatty():
                        let_go(stream)
            if self.open is None:
                raise Preempted
            self.open.ask(self.open.preempted_first.format(signal=name))
            self.open.limit()


def later(seconds: float) -> threading.Timer:
    """Send SIGTERM to the main thread."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGTERM))
    timer.daemon = True
    timer.start()
    return timer


_SIGNALS = _Signals()


@contextmanager
def watching() -> Iterator[None]:
    """Within it SIGTERM, SIGHUP and SIGUSR1 raise `Preempted`, and while an `Interrupt` is open
    they are noted. In another than the main thread nothing is changed."""
    if threading.current_thread() is not threading.main_thread() or _SIGNALS.installed:
        yield
        return
    _SIGNALS.install()
    try:
        yield
    finally:
        _SIGNALS.restore()


class End:
    """Of this process, once its command has come to one."""

    status: int | None = None
    """The command's."""
    heard: tuple[signal.Signals, ...] = ()
    """What it answers."""

    def hear(self) -> None:
        for number in self.heard:
            signal.signal(number, self)

    def over(self, status: int) -> None:
        """Called before the last words are out: whoever has read them may press Ctrl-C again, and
        that changes nothing any more."""
        self.status = status
        self.hear()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.status is None:
            raise KeyboardInterrupt
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, RuntimeError, ValueError):
                stream.flush()
        os._exit(PREEMPTED if self.status is None else self.status)


@contextmanager
def leaving() -> Iterator[End]:
    """For a process that ends with its command. What comes after the command's last words, while
    the interpreter ends, changes nothing of its status: neither a traceback nor another one. In
    another than the main thread nothing is changed."""
    end = End()
    if threading.current_thread() is not threading.main_thread():
        yield end
        return
    sys.stdout, sys.stderr = outliving(sys.stdout), outliving(sys.stderr)
    ignored = signal.SIG_IGN  # as by `nohup`
    every = (signal.SIGINT, *PREEMPTION)
    end.heard = tuple(number for number in every if signal.getsignal(number) != ignored)

    def deaf() -> None:
        """Last: after that the interpreter has no handlers of ours any more."""
        for number in end.heard:
            if signal.getsignal(number) is end:
                signal.signal(number, signal.SIG_IGN)

    atexit.register(deaf)
    end.hear()
    yield end


def preempted() -> str:
    """The signal that is ending this command, for people; "" where none is. To be asked for rather
    than `Preempted`, of which Ray makes a mere KeyboardInterrupt."""
    return f"{_SIGNALS.preempted.name}{_SIGNALS.late}" if _SIGNALS.preempted else ""


def asked() -> bool:
    """Whether Ctrl-C has asked this command to end; what it was to do before that may be lost."""
    return _SIGNALS.asked


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes that this thread starts within it never see `PREEMPTION`, nor do those that they
    start: schedulers signal every process of a job, and a checkpoint needs the trainer's, and
    Ray's, a while longer. Whoever starts them has to end them by other means.

    What came meanwhile is heeded at the end; so is what comes later, though a library put handlers
    of its own in place of ours (Ray's print a stack and abort).
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            _SIGNALS.again()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """What comes within it, Ctrl-C too, is heeded at its end: for what is not to be left half done,
    and has a deadline."""
    here = threading.current_thread() is threading.main_thread()
    if not here or _SIGNALS.waiting is not None:
        yield
        return
    _SIGNALS.waiting = []
    try:
        yield
    finally:
        came, _SIGNALS.waiting = _SIGNALS.waiting, None
        with ExitStack() as all_of_them:  # though the first of them may raise
            for number in reversed(came):
                all_of_them.callback(_SIGNALS.heed, number)


class Interrupt:
    """While open, answers whether to stop, rather than that a signal ends the command. Main thread
    only, one at a time."""

    def __init__(
        self,
        say: Callable[[str], None],
        first: str | Callable[[], str] = FIRST,
        *,
        preempted_first: str = PREEMPTED_FIRST,
        grace_s: float = 0.0,
    ) -> None:
        """first: message at Ctrl-C, or a function that returns it. preempted_first: message at a
        signal of `PREEMPTION`. grace_s: seconds after such a signal until `Preempted` is raised
        wherever the main thread then is; 0: never."""
        self._say, self.first, self.preempted_first = say, first, preempted_first
        self.asked = False
        self.grace_s, self._end = grace_s, float("inf")
        self._timer: threading.Timer | None = None

    def __call__(self) -> bool:
        return self.asked

    def hurry(self) -> bool:
        """Whether there is no time for anything but a checkpoint."""
        return _SIGNALS.preempted is not None

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() >= self._end

    def ask(self, words: str) -> None:
        """Note that it is to stop."""
        self.asked = True
        # The signal may have come in the middle of a line, or with the end of what reads them.
        with suppress(OSError, RuntimeError):
            self._say(words)

    def limit(self) -> None:
        """Raise `Preempted` once `grace_s` is over."""
        if not self.grace_s:
            return
        self._end = time.monotonic() + self.grace_s
        self._timer = later(self.grace_s + SLACK_S)

    def __enter__(self) -> Self:
        self._alone = watching()
        self._alone.__enter__()
        _SIGNALS.open = self
        if self.hurry():  # raised where nobody heard it
            _SIGNALS.heard()
            self.__exit__()
            raise Preempted
        return self

    def __exit__(self, *_: object) -> None:
        _SIGNALS.open = None
        if self._timer is not None:
            self._timer.cancel()
        self._alone.__exit__(None, None, None)


def let_go(stream: TextIO) -> None:
    """What is written to it from now on goes nowhere: its terminal, or its reader, is gone."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN)
"""There may be room again: on a disk, or in a pipe that does not wait for its reader."""


class _Outliving:
    """`outliving`"""

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
        if error.errno in FULL:
            raise error
        let_go(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outliving(stream: TextIO | None) -> TextIO:
    """The stream, whose terminal may go, as that of a job in the background, or whose reader
    (`keel train | tee`, ended first): nothing that is written fails then. None: it was closed
    before this process began (`>&-`)."""
    return cast(TextIO, _Outliving(stream or open(os.devnull, "w")))


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line, as `outliving` does. One for which the disk has no room is held back."""
    with suppress(OSError):
        print(text, file=outliving(stream or sys.stdout), flush=True)
