"""The sandbox of environments, with and without bubblewrap, and its memory limit."""

import os
import shutil
import sys
import threading
from pathlib import Path

import pytest

from keel.rewards.sandbox import processes
from keel.rewards.sandbox.bubblewrap import IsolationError
from keel.rewards.sandbox.environments import EnvironmentSandbox, environment_wrap, runtime
from keel.rewards.sandbox.processes import _MemoryLimiter, _ProcessUsage

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


@pytest.mark.parametrize("settings", [{"isolation": "none"}, {"writable": (Path("/no/such"),)}])
def test_bad_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError):
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


def test_a_reused_pid_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    excess = _ProcessUsage(resident=65 << 20, cpu_s=0.0, processes=2)
    monkeypatch.setattr(processes, "usage", lambda pid, include_root: excess)
    monkeypatch.setattr(processes, "_kill_sandbox", lambda pid, inside: pids.append(pid))
    own = os.getpid()
    for exited, killed in ((True, []), (False, [own])):
        limiter = _MemoryLimiter()
        limiter._thread = threading.current_thread()  # polled by hand
        monkeypatch.setattr(processes, "_has_exited", lambda pidfd, within_s, it=exited: it)
        limiter.hold(own, 64)
        limiter._poll(own, limiter._limits[own])
        assert pids == killed and bool(limiter.release(own)) is bool(killed)
