"""Whatever happens to a command or to its owner, nothing that it started is left."""

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


def test_an_owner_that_heeds_no_signal_has_a_command_that_does(tmp_path: Path) -> None:
    """As Ray's actors are in a run, for which a guard and its command would be deaf as well."""
    tells = (
        "import os, signal, sys\n"
        "with open(sys.argv[1] + '.new', 'w') as file:\n"
        "    print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []), file=file)\n"
        "os.rename(sys.argv[1] + '.new', sys.argv[1])\n"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        owner = guarded(tmp_path / "deaf", tmp_path / "log", tells)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert owner.stdout
    assert owner.stdout.read().strip() == b"0"
    assert (tmp_path / "deaf").read_text() == "False\n"


@pytest.mark.parametrize("whom", ["the command", "what it waits for"])
def test_a_command_that_stands_still_is_ended_with_all_it_has_started(
    tmp_path: Path, whom: str
) -> None:
    pids = tmp_path / "pids"
    owner = guarded(pids, tmp_path / "log")
    first, second = map(int, wait_for(lambda: pids.exists() and pids.read_text()).split())
    os.kill(parent(first) if whom == "the command" else second, signal.SIGSTOP)
    assert owner.stdout
    assert owner.stdout.read().strip() == b"-9", "its status, once everything is gone"
    assert not alive(first) and not alive(second)
    assert "looks found it stopped (SIGSTOP)" in (tmp_path / "log").read_text()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("how", ["owner", "command"])
def test_nothing_is_left(tmp_path: Path, how: str) -> None:
    pids = tmp_path / "pids"
    owner = guarded(pids, tmp_path / "log")
    assert owner.stdin
    assert owner.stdout
    wait_for(pids.exists, "the command's start")
    # The guard is a grandchild, out of reach for who kills the children of its owner.
    owner.wait(PATIENCE_S)
    children = [int(pid) for pid in pids.read_text().split()]
    command = parent(children[0])
    assert all(alive(pid) for pid in [*children, command])
    if how == "owner":
        owner.stdin.close()  # as when it dies
    else:
        os.kill(command, signal.SIGKILL)
    status = owner.stdout.read()  # ends with the guard
    # A busy machine may take longer over SIGTERM than it has.
    assert status.strip() in ((b"-15", b"-9") if how == "owner" else (b"-9",))
    assert not any(alive(pid) for pid in [*children, command])


def test_a_command_that_will_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    deaf = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    owner = guarded(
        ready, tmp_path / "log", f"{deaf}open(sys.argv[1], 'w').close(); time.sleep(1000)"
    )
    assert owner.stdin
    assert owner.stdout
    wait_for(ready.exists, "the command's start")
    owner.stdin.close()
    assert owner.stdout.read().strip() == b"-9"
