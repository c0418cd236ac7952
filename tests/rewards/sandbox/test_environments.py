"""The sandbox of environments on machines that have bubblewrap and on those that do not."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel.rewards.sandbox import keeper as keeper_module
from keel.rewards.sandbox import watch
from keel.rewards.sandbox.bubblewrap import IsolationError
from keel.rewards.sandbox.environments import EnvironmentSandbox, environment_wrap
from keel.rewards.sandbox.keeper import Keeper
from keel.rewards.sandbox.processes import Usage
from keel.rewards.sandbox.runtime import runtime
from keel.rewards.sandbox.seccomp import LOCAL, seccomp_filter
from tests.waiting import PATIENCE_S, wait_for

KNOB = "agents.environments.x.isolation"
NOTHING = 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'  # runs it, isolates nothing
HALF = """
for word in "$@"; do
  shift
  case "$before $word" in
    *--seccomp | --seccomp* | *--unshare-net) ;;
    *) set -- "$@" "$word" ;;
  esac
  before=$word
done
exec {bwrap} "$@"
"""
NO_PROC = """
for word in "$@"; do
  if [ "$word" = --proc ]; then
    echo "bwrap: Can't mount proc on /newroot/proc: Operation not permitted" >&2; exit 1
  fi
done
exec {bwrap} "$@"
"""


@pytest.fixture(scope="module")
def bubblewrap_works() -> None:
    try:
        environment_wrap("bubblewrap")
    except IsolationError as error:
        pytest.skip(str(error))


needs_bubblewrap = pytest.mark.usefixtures("bubblewrap_works")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine with another bubblewrap, or with none."""

    def put(script: str | None) -> None:
        if script is not None:
            (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "bwrap").chmod(0o755)
            monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
            return
        which = shutil.which
        monkeypatch.setattr(
            shutil, "which", lambda name, **kw: None if name == "bwrap" else which(name, **kw)
        )

    return put


@pytest.mark.e2e
def test_without_bubblewrap_no_environment_opens(stand_in) -> None:
    stand_in(None)
    with pytest.raises(IsolationError) as caught:
        environment_wrap("bubblewrap", knob=KNOB)
    said = str(caught.value)
    assert said.startswith(f"{KNOB} = 'bubblewrap' does not work here: bwrap is not installed; ")
    assert "apt-get install bubblewrap" in said
    assert f"set {KNOB}: none-i-trust-the-environments" in said
    assert environment_wrap("none-i-trust-the-environments", knob=KNOB) is None


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo bwrap: No permissions to create new namespace >&2; exit 1", "No permissions"),
        ("exit 3", "exit status 3"),
        (NOTHING, ""),
    ],
)
def test_isolation_is_tried_out_and_not_believed(script: str, message: str, stand_in) -> None:
    stand_in(script)
    with pytest.raises(
        IsolationError, match=rf"(?s)does not work here: .*{message}.*install bubble"
    ):
        environment_wrap("bubblewrap", processes=8)


@pytest.mark.e2e
@needs_bubblewrap
def test_half_an_isolation_is_none(stand_in) -> None:
    stand_in(HALF.format(bwrap=shutil.which("bwrap")))
    with pytest.raises(IsolationError, match=r"it opens sockets of 2, .* has memory that is"):
        environment_wrap("bubblewrap")


@pytest.mark.e2e
@needs_bubblewrap
def test_where_nothing_can_be_mounted_it_goes_without(stand_in) -> None:
    stand_in(NO_PROC.format(bwrap=shutil.which("bwrap")))
    wrap = environment_wrap("bubblewrap")
    assert isinstance(wrap, EnvironmentSandbox) and not wrap.mounts


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"isolation": "none"}, r"isolation = 'none': there are bubblewrap, none-i-trust-the-env"),
        ({"network": "some"}, "network = 'some': there are none, loopback, host"),
        ({"processes": 0}, "processes = 0 must be at least 1"),
        ({"files_mib": 0}, "files_mib = 0 must be at least 1"),
        ({"memory_mib": 32}, "memory_mib = 32 must be at least 64"),
        ({"writable": (Path("/no/such"),)}, "there is no folder /no/such to write to"),
    ],
)
def test_what_makes_no_sense(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        environment_wrap(**{"isolation": "bubblewrap", **wrong})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_folder_that_the_user_inside_could_not_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match=f"chmod o\\+rwx {tmp_path}"):
        environment_wrap("bubblewrap", writable=(tmp_path,))


def test_the_filter_for_environments() -> None:
    for machine in ("x86_64", "aarch64"):
        strict, local = (seccomp_filter(machine, sockets=one) for one in ((), LOCAL))
        assert strict == seccomp_filter(machine) != local
        assert len(local) - len(strict) == 8 * 3  # six steps for `socket` instead of two, …
    assert LOCAL == (socket.AF_UNIX,)


@pytest.mark.e2e
def test_what_an_interpreter_needs() -> None:
    found = runtime(sys.executable)
    assert found.executable == sys.executable
    real = Path(sys.executable).resolve()
    for path in (Path(os.__file__), Path(pytest.__file__), real):
        assert any(path.is_relative_to(one) for one in (*found.paths, Path("/usr"))), path
    assert runtime("/bin/sh").executable == "/bin/sh"
    with pytest.raises(FileNotFoundError, match="there is no program nobody"):
        runtime("nobody")


@pytest.mark.e2e
def test_what_a_script_needs(tmp_path: Path) -> None:
    shell = runtime("/bin/sh")
    for name, line in (("one", "/bin/sh"), ("two", "/usr/bin/env -S /bin/sh -e")):
        script = tmp_path / name
        script.write_text(f"#!{line}\n")
        script.chmod(0o755)
        assert runtime(str(script)).paths == (script, *shell.paths)


def test_a_keeper_lets_go_of_what_is_gone() -> None:
    keeper = Keeper()
    keeper.hold(2**22 + 1, 64)  # no process has such a number
    thread = keeper._thread
    assert thread is not None
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and keeper.release(2**22 + 1) == ""


@pytest.mark.e2e
def test_a_keeper_holds_on_to_what_seems_to_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that has just begun may, by the kernel's counters."""
    monkeypatch.setattr(keeper_module, "LOOK_EVERY_S", 0.01)
    said = [Usage(resident=0, cpu_s=0.0, processes=1)] * 3
    said.append(Usage(resident=65 << 20, cpu_s=0.0, processes=2))
    monkeypatch.setattr(keeper_module, "usage", lambda pid, itself: said.pop(0))
    keeper = Keeper()
    with subprocess.Popen(["/bin/sh", "-c", "sleep 1000; exit 7"]) as process:
        keeper.hold(process.pid, 64)
        assert process.wait(PATIENCE_S) == 7  # its child was ended, and it by itself
    said_why = "out of memory: its 2 processes took 65 MiB together, and may take 64"
    assert keeper.release(process.pid) == said_why and not said


def over(pid: int, *, itself: bool) -> Usage:
    return Usage(resident=65 << 20, cpu_s=0.0, processes=2)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those that a keeper would have ended: it takes them all to be over their limit."""
    found: list[int] = []
    monkeypatch.setattr(keeper_module, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(keeper_module, "usage", over)
    monkeypatch.setattr(keeper_module, "_begun", lambda pid: b"1")
    monkeypatch.setattr(keeper_module, "end_inside", found.append)
    return found


@pytest.mark.parametrize("what", ["usage", "_begun", "end_inside"])
def test_a_look_that_fails_is_one_look(
    what: str,
    ended: list[int],
    monkeypatch: pytest.MonkeyPatch,
    logged: list[logging.LogRecord],
) -> None:
    left = [OSError(errno.EMFILE, "too many open files"), OSError(errno.ENOMEM, "no memory")]
    works = getattr(keeper_module, what)

    def fails(*given: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return works(*given, **named)

    monkeypatch.setattr(keeper_module, what, fails)
    keeper = Keeper()
    for pid in (1, 2):
        keeper.hold(pid, 64)
    wait_for(lambda: sorted(ended) == [1, 2])
    wait_for(lambda: keeper._thread is None)
    assert keeper.release(1) == keeper.release(2) != ""
    assert len(logged) <= 1


def test_a_keeper_that_has_ended_is_replaced(ended: list[int]) -> None:
    keeper = Keeper()
    keeper._thread = threading.Thread(target=int)
    keeper._thread.start()
    keeper._thread.join(PATIENCE_S)
    keeper.hold(1, 64)
    wait_for(lambda: ended == [1])


def test_what_cannot_be_read_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(Path, "read_bytes", full)
    with pytest.raises(OSError, match="too many"):
        keeper_module._begun(os.getpid())


def test_a_look_at_a_program_that_fails_is_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = [OSError(errno.EMFILE, "too many open files"), None]

    def fails(pid: int) -> Usage:
        if error := said.pop(0):
            raise error
        return over(pid, itself=True)

    pipe = SimpleNamespace(fileno=lambda: 0)
    process: Any = SimpleNamespace(stdout=pipe, stderr=pipe, pid=1, poll=lambda: None)
    ends: list[str] = []
    monkeypatch.setattr(watch, "usage", fails)
    monkeypatch.setattr(watch.Watch, "_end", lambda self, status: ends.append(status))
    looked_at = watch.Watch(process, 1, 2, watch.Limits(memory_mib=64), 0)
    looked_at._look()
    assert ends == []
    looked_at._look()
    assert ends == ["memory"]
