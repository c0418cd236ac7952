"""Tests that the reaper leaves no process behind, however the command or its owner ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keel.rollout.judge import reaper
from tests.agents.episodes import alive
from tests.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.e2e

STARTS_THREE = """
import subprocess, sys, time
sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
print(*(child.pid for child in children), file=open(sys.argv[1] + ".new", "w"), flush=True)
import os; os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(1000)
"""


def guarded(pids: Path, log: Path, program: str = STARTS_THREE) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", program, str(pids)]
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(reaper.__file__), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
        )


def test_command_receives_signals_its_owner_blocks(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "with open(sys.argv[1] + '.new', 'w') as file:\n"
        "    print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []), file=file)\n"
        "os.rename(sys.argv[1] + '.new', sys.argv[1])\n"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        owner = guarded(tmp_path / "blocked", tmp_path / "log", program)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert owner.stdout
    assert owner.stdout.read().strip() == b"0"
    assert (tmp_path / "blocked").read_text() == "False\n"


@pytest.mark.parametrize("which", ["command", "child"])
def test_a_stopped_command_is_killed(tmp_path: Path, which: str) -> None:
    pids = tmp_path / "pids"
    owner = guarded(pids, tmp_path / "log")
    first, second = map(int, wait_for(lambda: pids.exists() and pids.read_text()).split())
    os.kill(parent(first) if which == "command" else second, signal.SIGSTOP)
    assert owner.stdout
    assert owner.stdout.read().strip() == b"-9"
    assert not alive(first) and not alive(second)
    assert "SIGSTOP" in (tmp_path / "log").read_text()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("ended_by", ["owner", "command"])
def test_all_descendants_end(tmp_path: Path, ended_by: str) -> None:
    pids = tmp_path / "pids"
    owner = guarded(pids, tmp_path / "log")
    assert owner.stdin
    assert owner.stdout
    wait_for(pids.exists, "start of the command")
    # The reaper is a grandchild: killing the owner's children does not reach it.
    owner.wait(PATIENCE_S)
    children = [int(pid) for pid in pids.read_text().split()]
    command = parent(children[0])
    assert all(alive(pid) for pid in [*children, command])
    if ended_by == "owner":
        owner.stdin.close()
    else:
        os.kill(command, signal.SIGKILL)
    status = owner.stdout.read()  # ends with the reaper
    # On a busy machine SIGTERM may time out.
    assert status.strip() in ((b"-15", b"-9") if ended_by == "owner" else (b"-9",))
    assert not any(alive(pid) for pid in [*children, command])


def test_a_command_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ignoring = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    owner = guarded(
        ready, tmp_path / "log", f"{ignoring}open(sys.argv[1], 'w').close(); time.sleep(1000)"
    )
    assert owner.stdin
    assert owner.stdout
    wait_for(ready.exists, "start of the command")
    owner.stdin.close()
    assert owner.stdout.read().strip() == b"-9"
