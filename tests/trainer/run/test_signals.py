"""Ctrl-C, preemption, lost terminals, and the exit status of commands."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable

import pytest
from ray.exceptions import ActorDiedError

from keel.commands import dispatch as commands
from keel.commands.cli import main
from keel.model.ray_timeouts import RayLost
from keel.trainer.run.restarts import WorkerLost
from keel.trainer.run.signals import (
    PREEMPTED,
    PREEMPTION,
    Interrupt,
    Preempted,
    preempted,
    signals_blocked,
    signals_deferred,
    stop_requested,
    watching,
)

DEADLINE_S = 120


def test_first_ctrl_c_stops_and_second_interrupts() -> None:
    lines: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with watching():
        with Interrupt(lines.append) as interrupt:
            assert not interrupt() and not stop_requested()
            signal.raise_signal(signal.SIGINT)
            assert interrupt() and not interrupt.should_abort() and len(lines) == 1
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            assert interrupt.should_abort()
        assert stop_requested()
    assert signal.getsignal(signal.SIGINT) == before
    with watching():
        assert not stop_requested()


@pytest.mark.parametrize("number", PREEMPTION)
def test_preemption_aborts_once(number: signal.Signals) -> None:
    lines: list[str] = []
    before = signal.getsignal(number)
    with Interrupt(lines.append, grace_s=DEADLINE_S) as interrupt:
        signal.raise_signal(number)
        assert interrupt() and interrupt.should_abort()
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        assert len(lines) == 1 and number.name in lines[0]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) == before
    with Interrupt(lines.append) as interrupt:
        assert not interrupt() and not interrupt.should_abort()


def test_exceeded_grace_raises_anywhere() -> None:
    with watching():
        with pytest.raises(Preempted), Interrupt(lambda _: None, grace_s=0.01):
            signal.raise_signal(signal.SIGTERM)
            threading.Event().wait(DEADLINE_S)
        assert preempted().startswith("SIGTERM, ") and "run.grace_s = 0.01" in preempted()
    assert not preempted()


def raises(error: BaseException | None = None) -> Callable[..., None]:
    """Return a command that is preempted and then fails with `error`, or ends early."""

    def command(*_: object) -> None:
        with Interrupt(lambda _: None):
            signal.raise_signal(signal.SIGTERM)
            if error is not None:
                raise error

    return command


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (lambda *_: signal.raise_signal(signal.SIGTERM), PREEMPTED),
        (raises(), PREEMPTED),
        (raises(WorkerLost("rank 0 died")), PREEMPTED),
        (raises(RayLost("the raylet is gone")), PREEMPTED),
        (raises(ActorDiedError()), PREEMPTED),
        (raises(TimeoutError("no answer")), PREEMPTED),
        (raises(RuntimeError("the disk is full")), 1),
    ],
)
def test_preempted_command_has_its_own_status(
    command: Callable[..., None],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("KEEL_TRACEBACK", raising=False)
    monkeypatch.setattr(commands, "lost_reason", lambda: "")
    monkeypatch.setitem(commands.COMMANDS, "check", command)
    assert main(["check", "quickstart"]) == status
    assert ("SIGTERM" in capsys.readouterr().err) == (status == PREEMPTED)


@pytest.mark.e2e
def test_blocked_signals_never_reach_children() -> None:
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


def test_deferred_signals_are_handled_afterwards() -> None:
    done: list[str] = []
    with watching():
        with pytest.raises(KeyboardInterrupt), signals_deferred():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            with signals_deferred():
                done.append("inner")
            done.append("outer")
        assert done == ["inner", "outer"]
        assert stop_requested() and preempted() == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


HANGUP = """
import os, signal, sys, time
from keel.commands import cli

def stopped(_):
    os.write({ready}, b"1")
    while os.isatty(1):
        time.sleep(0.01)
    print("the terminal is gone")
    return 0

{first}
cli.heavy = stopped
sys.exit(cli.main())
"""


@pytest.mark.e2e
@pytest.mark.parametrize("heard", [True, False], ids=["hung up", "in the background"])
def test_lost_terminal_ends_a_command_by_signal_only(heard: bool) -> None:
    actual, expected = pty.openpty()
    read, ready = os.pipe()
    first = "" if heard else "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    script = HANGUP.format(ready=ready, first=first)
    with subprocess.Popen(
        [sys.executable, "-c", script, "check", "quickstart"],
        stdin=expected,
        stdout=expected,
        stderr=expected,
        start_new_session=True,
        pass_fds=[ready],
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        os.close(expected)
        os.read(read, 1)
        os.close(actual)
        assert process.wait(timeout=DEADLINE_S) == (PREEMPTED if heard else 0)
    os.close(read)
    os.close(ready)
