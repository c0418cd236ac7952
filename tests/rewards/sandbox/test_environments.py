"""The sandbox of environments, with and without bubblewrap, and its memory limit."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel.rewards.sandbox import processes, watch
from keel.rewards.sandbox.bubblewrap import IsolationError
from keel.rewards.sandbox.environments import EnvironmentSandbox, environment_wrap
from keel.rewards.sandbox.processes import MemoryLimiter, ProcessUsage
from keel.rewards.sandbox.runtime import runtime
from tests.waiting import PATIENCE_S, wait_for

KNOB = "agents.environments.x.isolation"
NO_ISOLATION = 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'
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


needs_bubblewrap = pytest.mark.usefixtures("box")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replace bubblewrap by a script."""

    def put(script: str) -> None:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return put


@pytest.mark.e2e
@pytest.mark.parametrize(
    "script",
    ["echo bwrap: No permissions to create new namespace >&2; exit 1", "exit 3", NO_ISOLATION],
)
def test_isolation_is_probed(script: str, stand_in) -> None:
    stand_in(script)
    with pytest.raises(IsolationError, match=r"agents\.isolation"):
        environment_wrap("bubblewrap", processes=8)


@pytest.mark.e2e
@needs_bubblewrap
def test_partial_isolation_is_refused(stand_in) -> None:
    stand_in(HALF.format(bwrap=shutil.which("bwrap")))
    with pytest.raises(IsolationError, match="sockets"):
        environment_wrap("bubblewrap")


@pytest.mark.e2e
@needs_bubblewrap
def test_works_without_proc(stand_in) -> None:
    stand_in(NO_PROC.format(bwrap=shutil.which("bwrap")))
    wrap = environment_wrap("bubblewrap")
    assert isinstance(wrap, EnvironmentSandbox) and not wrap.mounts


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"isolation": "none"}, "isolation"),
        ({"network": "some"}, "network"),
        ({"processes": 0}, "processes"),
        ({"files_mib": 0}, "files_mib"),
        ({"memory_mib": 32}, "memory_mib"),
        ({"writable": (Path("/no/such"),)}, "/no/such"),
    ],
)
def test_bad_settings_are_refused(settings: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        environment_wrap(**{"isolation": "bubblewrap", **settings})


@pytest.mark.e2e
def test_runtime_of_an_interpreter() -> None:
    program = runtime(sys.executable)
    assert program.executable == sys.executable
    real = Path(sys.executable).resolve()
    for path in (Path(os.__file__), Path(pytest.__file__), real):
        assert any(path.is_relative_to(one) for one in (*program.paths, Path("/usr"))), path
    assert runtime("/bin/sh").executable == "/bin/sh"
    with pytest.raises(FileNotFoundError, match="nobody"):
        runtime("nobody")


@pytest.mark.e2e
def test_a_new_process_without_memory_stays_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports no memory for a process that has just started."""
    monkeypatch.setattr(processes, "_POLL_S", 0.01)
    usages = [ProcessUsage(resident=0, cpu_s=0.0, processes=1)] * 3
    usages.append(ProcessUsage(resident=65 << 20, cpu_s=0.0, processes=2))
    monkeypatch.setattr(processes, "usage", lambda pid, include_root: usages.pop(0))
    limiter = MemoryLimiter()
    with subprocess.Popen(["/bin/sh", "-c", "sleep 1000; exit 7"]) as process:
        limiter.hold(process.pid, 64)
        assert process.wait(PATIENCE_S) == 7  # only its child was killed
    reason = limiter.release(process.pid)
    assert "2 processes" in reason and "65 MiB" in reason and not usages


def excessive(pid: int, *, include_root: bool = True) -> ProcessUsage:
    return ProcessUsage(resident=65 << 20, cpu_s=0.0, processes=2)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """PIDs that a limiter kills; all processes exceed their limit."""
    pids: list[int] = []
    monkeypatch.setattr(processes, "_POLL_S", 0.001)
    monkeypatch.setattr(processes, "usage", excessive)
    monkeypatch.setattr(processes, "_start_time", lambda pid: b"1")
    monkeypatch.setattr(processes, "_kill_first_inside", pids.append)
    return pids


@pytest.mark.parametrize("name", ["usage", "_start_time", "_kill_first_inside"])
def test_a_failed_poll_is_retried(
    name: str,
    killed: list[int],
    monkeypatch: pytest.MonkeyPatch,
    logged: list[logging.LogRecord],
) -> None:
    errors = [OSError(errno.EMFILE, "too many open files"), OSError(errno.ENOMEM, "no memory")]
    works = getattr(processes, name)

    def fails_twice(*values: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return works(*values, **options)

    monkeypatch.setattr(processes, name, fails_twice)
    limiter = MemoryLimiter()
    for pid in (1, 2):
        limiter.hold(pid, 64)
    wait_for(lambda: sorted(killed) == [1, 2])
    wait_for(lambda: limiter._thread is None)
    assert limiter.release(1) == limiter.release(2) != ""
    assert len(logged) <= 1


def test_a_reused_pid_is_not_killed(killed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = MemoryLimiter()
    limiter._thread = threading.current_thread()  # polled by hand
    limiter.hold(1, 64)
    monkeypatch.setattr(processes, "_start_time", lambda pid: b"2")
    limiter._poll(1, limiter._limits[1])
    assert killed == [] and limiter.release(1) == ""


def test_a_failed_poll_of_a_run_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Any] = [OSError(errno.EMFILE, "too many open files"), None]

    def fails_once(pid: int) -> ProcessUsage:
        if error := errors.pop(0):
            raise error
        return excessive(pid)

    pipe = SimpleNamespace(fileno=lambda: 0)
    process: Any = SimpleNamespace(stdout=pipe, stderr=pipe, pid=1, poll=lambda: None)
    ends: list[str] = []
    monkeypatch.setattr(watch, "usage", fails_once)
    monkeypatch.setattr(watch.Watch, "_end", lambda self, status: ends.append(status))
    run = watch.Watch(process, 1, 2, watch.Limits(memory_mib=64), 0)
    run._poll()
    assert ends == []
    run._poll()
    assert ends == ["memory"]
