"""Faults and measurements of `benchmarks.chaos` without a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import preload
from benchmarks.chaos.preload import Preload

HOUR_S = 3600.0
CLOCKS = """
import os, threading, time
wall, since, timer = time.time(), time.monotonic(), threading.Event()
print("ready", flush=True)
input()
print(time.time() - wall - (time.monotonic() - since))
before = time.monotonic()
timer.wait(0.3)
print(time.monotonic() - before)
took = []
for _ in range(5):  # the disk may have others to serve
    before = time.monotonic()
    with open(PATH, "w") as file:
        os.fsync(file.fileno())
    took.append(time.monotonic() - before)
print(min(took))
"""


@pytest.mark.e2e
@pytest.mark.skipif(bool(preload.unavailable()), reason=preload.unavailable())
def test_clock_jump_and_slow_sync_are_isolated(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    faults = Preload(tmp_path, folder)
    for path, slow in ((folder / "file", True), (tmp_path / "other", False)):
        faults.slow(write_s=0, sync_s=0)
        with subprocess.Popen(
            [sys.executable, "-c", CLOCKS.replace("PATH", repr(str(path)))],
            env={**os.environ, **faults.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout and process.stdin
            assert process.stdout.readline() == "ready\n"
            faults.jump(-HOUR_S)
            faults.slow(write_s=0, sync_s=0.5)
            output, _ = process.communicate("\n", timeout=60)
        jumped, waited, synced = map(float, output.split())
        assert jumped == pytest.approx(-HOUR_S, abs=1)
        assert 0.3 <= waited < HOUR_S / 2
        assert (synced >= 0.5) is slow
    assert faults.ahead_s == -2 * HOUR_S
