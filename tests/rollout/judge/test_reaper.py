"""Tests that the reaper leaves no processes behind, however the command or its owner ends."""

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
import os, subprocess, sys, time
sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
print(*(child.pid for child in children), file=open(sys.argv[1] + ".new", "w"), flush=True)
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(1000)
"""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("event", "statuses"),
    [
        # On a busy machine SIGTERM may time out.
        ("the owner ends", (b"-15", b"-9")),
        ("the command is killed", (b"-9",)),
        ("the command is stopped", (b"-9",)),
        ("a child is stopped", (b"-9",)),
    ],
)
def test_all_descendants_end(tmp_path: Path, event: str, statuses: tuple[bytes, ...]) -> None:
    pids, log, python = tmp_path / "pids", tmp_path / "log", [sys.executable, "-I", "-S"]
    with log.open("wb") as output:
        owner = subprocess.Popen(
            [*python, str(reaper.__file__), *python, "-c", STARTS_THREE, str(pids)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
        )
    assert owner.stdin and owner.stdout
    wait_for(pids.exists, "start of the command")
    # The reaper is a grandchild: killing the owner's children does not reach it.
    owner.wait(PATIENCE_S)
    children = [int(pid) for pid in pids.read_text().split()]
    command = parent(children[0])
    assert all(alive(pid) for pid in [*children, command])
    if event == "the owner ends":
        owner.stdin.close()
    elif event == "the command is killed":
        os.kill(command, signal.SIGKILL)
    else:
        os.kill(command if event == "the command is stopped" else children[1], signal.SIGSTOP)
    assert owner.stdout.read().strip() in statuses  # ends with the reaper
    assert not any(alive(pid) for pid in [*children, command])
