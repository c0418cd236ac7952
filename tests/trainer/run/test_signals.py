"""Ctrl-C: once to finish the step, twice to stop. A scheduler's signal: at once, with a status of
its own. Nothing that a library, a child or a terminal does comes in between."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from keel.commands import train as commands
from keel.commands.cli import INTERRUPTED, REFUSED, main
from keel.model.ray_timeouts import RayLost
from keel.trainer.run.restarts import WorkerLost
from keel.trainer.run.signals import (
    PREEMPTED,
    PREEMPTION,
    SLACK_S,
    Interrupt,
    Preempted,
    asked,
    preempted,
    print_line,
    signals_blocked,
    signals_deferred,
    watching,
)

DEADLINE_S = 120


def test_the_first_ctrl_c_asks_and_the_second_interrupts() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with Interrupt(said.append) as interrupt:
        assert not interrupt()
        signal.raise_signal(signal.SIGINT)
        assert interrupt() and not interrupt.hurry()
        assert len(said) == 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("number", PREEMPTION)
def test_a_scheduler_is_heard_once_and_ctrl_c_still_stops_at_once(number: signal.Signals) -> None:
    said: list[str] = []
    before = signal.getsignal(number)
    with Interrupt(said.append, grace_s=DEADLINE_S) as interrupt:
        signal.raise_signal(number)
        assert interrupt() and interrupt.hurry()
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        assert len(said) == 1 and number.name in said[0]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) == before
    with Interrupt(said.append) as interrupt:
        assert not interrupt() and not interrupt.hurry()


def test_a_scheduler_cuts_short_what_ctrl_c_lets_end() -> None:
    with Interrupt(lambda _: None) as interrupt:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.hurry()


def test_once_the_grace_is_over_it_ends_wherever_it_is() -> None:
    with watching():
        with pytest.raises(Preempted), Interrupt(lambda _: None, grace_s=0.01):
            signal.raise_signal(signal.SIGTERM)
            threading.Event().wait(DEADLINE_S)
        assert preempted() == "SIGTERM, and not done within run.grace_s = 0.01 s"
    assert not preempted(), "the next command of this process was told nothing"


def test_words_that_cannot_be_said_keep_nobody_from_stopping() -> None:
    def gone(_: str) -> None:
        raise BrokenPipeError

    with Interrupt(gone) as interrupt:
        signal.raise_signal(signal.SIGTERM)
        assert interrupt()


def test_before_anything_can_be_saved_a_command_ends_at_once_with_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(commands.COMMANDS, "check", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert main(["check", "quickstart"]) == PREEMPTED == 128 + signal.SIGTERM
    assert "keel check: stopped by SIGTERM; what was saved is there" in capsys.readouterr().err


def test_a_command_that_a_scheduler_has_ended_early_does_not_pass_for_one_that_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stops(*_: object) -> None:
        with Interrupt(lambda _: None) as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert interrupt()

    monkeypatch.setitem(commands.COMMANDS, "check", stops)
    assert main(["check", "quickstart"]) == PREEMPTED
    assert "stopped by SIGHUP" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (WorkerLost("rank 0 died"), PREEMPTED),
        (RayLost("the raylet is gone"), PREEMPTED),
        (ActorDiedError(), PREEMPTED),
        (TimeoutError("no answer"), PREEMPTED),
        (RuntimeError("the disk is full"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_machine_takes_with_it_does_not_hide_that_it_goes(
    error: Exception,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def loses(*_: object) -> None:
        with Interrupt(lambda _: None):
            signal.raise_signal(signal.SIGTERM)
            raise error

    monkeypatch.delenv("KEEL_TRACEBACK", raising=False)
    monkeypatch.setattr(commands, "lost", lambda: "")
    monkeypatch.setitem(commands.COMMANDS, "check", loses)
    assert main(["check", "quickstart"]) == status
    said = capsys.readouterr().err
    assert str(error) in said and ("stopped by SIGTERM" in said) == (status == PREEMPTED)


def test_a_ray_that_is_lost_at_the_very_end_changes_no_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its threads would crash at exit."""
    left: list[int] = []
    monkeypatch.setattr(commands, "lost", lambda: "its raylet is gone")
    monkeypatch.setattr(commands, "exit_now", left.append)
    monkeypatch.setitem(commands.COMMANDS, "check", lambda *_: None)
    assert main(["check", "quickstart"]) == 0 and left == [0]


def test_that_ctrl_c_has_come_is_known_after_the_loop() -> None:
    with watching():
        assert not asked()
        with Interrupt(lambda _: None):
            signal.raise_signal(signal.SIGINT)
        assert asked()
    with watching():
        assert not asked()


def test_nohup_is_left_alone() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with watching():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.e2e
def test_children_started_behind_the_shield_outlive_a_signal_to_all_and_ours_is_heard() -> None:
    echo = [sys.executable, "-S", "-c", "print(input())"]
    with watching():
        with signals_blocked():
            child = subprocess.Popen(echo, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for number in PREEMPTION:
                child.send_signal(number)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray does
        with pytest.raises(Preempted):
            signal.raise_signal(signal.SIGTERM)
    assert child.communicate("alive", timeout=DEADLINE_S)[0] == "alive\n"


class Dying:
    """Out of whose destructor no exception comes."""

    def __init__(self, last: Callable[[], object]) -> None:
        self._last = last

    def __del__(self) -> None:
        self._last()


def test_a_signal_that_comes_while_something_is_destroyed_is_heard_after_it() -> None:
    before = sys.unraisablehook
    with watching():
        with pytest.raises(Preempted):
            Dying(partial(signal.raise_signal, signal.SIGHUP))
            threading.Event().wait(DEADLINE_S)
        assert preempted() == "SIGHUP"
        signal.raise_signal(signal.SIGTERM)  # once: what is tidied up after it is not disturbed
    assert sys.unraisablehook == before


def test_time_that_is_over_while_something_is_destroyed_is_over_after_it() -> None:
    with pytest.raises(Preempted), Interrupt(lambda _: None, grace_s=0.01):
        signal.raise_signal(signal.SIGTERM)
        Dying(partial(threading.Event().wait, DEADLINE_S))
        threading.Event().wait(DEADLINE_S)


def test_what_nobody_heard_is_not_said_to_who_comes_later() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with watching():
            Dying(partial(signal.raise_signal, signal.SIGTERM))
            assert preempted()
        threading.Event().wait(3 * SLACK_S)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not came


def test_an_end_that_nobody_heard_is_heard_before_anything_is_sampled() -> None:
    with watching():
        Dying(partial(signal.raise_signal, signal.SIGTERM))
        with pytest.raises(Preempted), Interrupt(lambda _: None):
            pass
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_must_not_be_left_half_done_is_done_before_a_signal_is_heeded(number: int) -> None:
    done: list[str] = []
    with watching():
        with pytest.raises(KeyboardInterrupt), signals_deferred():
            signal.raise_signal(number)
            with signals_deferred():
                done.append("inner")
            done.append("outer")
        assert bool(preempted()) == (number == signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert done == ["inner", "outer"]


def test_of_several_signals_that_were_put_off_none_is_forgotten() -> None:
    with watching():
        with pytest.raises(KeyboardInterrupt), signals_deferred():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
        assert asked() and preempted() == "SIGTERM"


def test_a_reader_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        assert isinstance(pipe, TextIOWrapper)
        print_line("lost", pipe)
        print_line("lost, too", pipe)  # and closing it says nothing either


LATE = """
import atexit, os, signal, sys
from keel.commands import cli

number = int(sys.argv.pop())

def again(when):
    if when == "{when}":
        os.kill(os.getpid(), number)

class Last:
    def __del__(self):
        again("modules go")

class Read:
    def write(self, text):
        sys.__stderr__.write(text)
        if text.endswith("\\n"):
            again("they are said")

    def flush(self):
        sys.__stderr__.flush()

def stopped(_):
    atexit.register(again, "libraries end")
    print("said", end="")
    sys.stderr = Read()
    signal.raise_signal(number)

cli.heavy, last = stopped, Last()
sys.exit(cli.main())
"""


@pytest.mark.e2e
@pytest.mark.parametrize("when", ["they are said", "libraries end", "modules go"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name)
def test_what_comes_after_the_last_words_changes_no_status(
    number: signal.Signals, when: str
) -> None:
    command = [sys.executable, "-c", LATE.format(when=when), "check", "quickstart", str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == (INTERRUPTED if number == signal.SIGINT else PREEMPTED)
    # Before that a slow machine says what it waits for.
    assert done.stdout.endswith("said") and done.stderr.startswith("keel check: stopped")
    assert done.stderr.count("\n") == 1


ALONE = """
import os, signal, sys, time
from keel.commands import cli

def stopped(_):
    os.write({said}, b"1")
    while os.isatty(1):  # no more once it is hung up
        time.sleep(0.01)
    print("nobody reads this")
    return 0

{first}
cli.heavy = stopped
sys.exit(cli.main())
"""


@pytest.mark.e2e
@pytest.mark.parametrize("heard", [True, False], ids=["hung up", "in the background"])
def test_a_terminal_that_goes_ends_nothing_but_by_its_signal(heard: bool) -> None:
    ours, its = pty.openpty()
    ready, said = os.pipe()
    first = "" if heard else "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    command = [sys.executable, "-c", ALONE.format(said=said, first=first), "check", "quickstart"]
    with subprocess.Popen(
        command,
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        pass_fds=[said],
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        os.close(its)
        os.read(ready, 1)
        os.close(ours)
        assert process.wait(timeout=DEADLINE_S) == (PREEMPTED if heard else 0)
    os.close(ready)
    os.close(said)


def test_a_full_disk_loses_no_word_that_is_told_before_or_after(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as log:
        at, full = os.dup(log.fileno()), os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, log.fileno())
        print_line("during", log)
        assert os.path.samestat(os.fstat(log.fileno()), os.fstat(full))
        os.dup2(at, log.fileno())
        print_line("after", log)
        os.close(at)
        os.close(full)
    assert path.read_text() == "during\nafter\n"


def test_a_pipe_that_is_full_for_a_while_is_written_on() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write, b"." * 4096)
    with os.fdopen(write, "w") as pipe:
        print_line("during", pipe)
        while os.read(read, 65536)[-1:] == b"." and select.select([read], [], [], 0)[0]:
            pass
        print_line("after", pipe)
        assert os.read(read, 4096) == b"during\nafter\n"
    os.close(read)


@pytest.mark.e2e
def test_a_command_whose_output_was_closed_does_what_it_is_for() -> None:
    command = [sys.executable, "-m", "keel", "check", "nowhere.yaml"]
    how: dict[str, Any] = {"text": True, "timeout": DEADLINE_S, "preexec_fn": lambda: os.close(1)}
    done = subprocess.run(command, stderr=subprocess.PIPE, **how)
    assert done.returncode == REFUSED and done.stderr.count("\n") == 1, done.stderr
