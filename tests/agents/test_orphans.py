"""What programs leave behind is reaped when it ends: a sandbox has room for few processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e

ORPHANS = "for i in 1 2 3; do (true &); done"
PROGRAM = f"""{ORPHANS}
for n in $(seq 1000); do
    set -- $(cat /proc/$PPID/task/$PPID/children)
    [ $# = 1 ] && exit 7
    sleep 0.02
done"""
"""Ends with 7 once its parent has no child but it."""
DRIVEN = f"""
import subprocess
from keel.agents.env_runtime.drive import keep_orphans, status_of
keep_orphans()
process = subprocess.Popen(["bash", "-c", {PROGRAM!r}])
assert status_of(process) == 7 == process.poll()
process = subprocess.Popen(["bash", "-c", "kill -9 $$"])
assert status_of(process) == -9
"""
COMMANDS = f"""
import os, time
from keel.agents.environments.code import processes
processes.adopt()
def run(command):
    return processes.run(["bash", "-c", command], env=os.environ, folder="/", within_s=60)
assert run({ORPHANS!r} + "; exit 3")[0] == 3
for _ in range(1000):
    assert run("exit 5")[0] == 5
    with open(f"/proc/self/task/{{os.getpid()}}/children") as file:
        if not file.read().split():
            break
    time.sleep(0.02)
else:
    raise SystemExit("they are there still")
"""


@pytest.mark.parametrize("code", [DRIVEN, COMMANDS], ids=["driven", "commands"])
def test_ended_orphans_are_reaped(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
