"""Whatever happens to a command or to its owner, nothing that it started is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from keel.rollout.judge import reaper

pytestmark = pytest.mark.e2e

STARTS_THREE = """
import subprocess, sys, time
sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
print(*(child.pid for child in children), file=open(sys.argv[1] + ".new", "w"), flush=True)
import os; os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(60)
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


def until(happens: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 20
    while not happens():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("how", ["owner", "command"])
def test_nothing_is_left(tmp_path: Path, how: str) -> None:
    pids = tmp_path / "pids"
    owner = guarded(pids, tmp_path / "log")
    assert owner.stdin
    assert owner.stdout
    until(pids.exists, "the command did not start")
    owner.wait(
        10
    )  # the guard is a grandchild, out of reach for who kills the children of its owner
    children = [int(pid) for pid in pids.read_text().split()]
    command = parent(children[0])
    assert all(runs(pid) for pid in [*children, command])
    if how == "owner":
        owner.stdin.close()  # as when it dies
    else:
        os.kill(command, signal.SIGKILL)
    status = owner.stdout.read()  # ends with the guard
    assert status.strip() == (b"-15" if how == "owner" else b"-9")
    assert not any(runs(pid) for pid in [*children, command])


def test_a_command_that_will_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    deaf = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    owner = guarded(
        ready, tmp_path / "log", f"{deaf}open(sys.argv[1], 'w').close(); time.sleep(60)"
    )
    assert owner.stdin
    assert owner.stdout
    until(ready.exists, "the command did not start")
    started = time.monotonic()
    owner.stdin.close()
    assert owner.stdout.read().strip() == b"-9"
    assert time.monotonic() - started < reaper.GRACE_S + 5
