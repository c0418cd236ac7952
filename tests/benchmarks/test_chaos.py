"""Faults of `benchmarks.chaos`, and which differences they excuse."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.chaos.faults import Fault
from benchmarks.chaos.means import Preload, preload_unavailable
from benchmarks.chaos.outcome import compared

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
@pytest.mark.skipif(bool(preload_unavailable()), reason=preload_unavailable())
def test_clock_jump_and_slow_sync_are_isolated(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    faults = Preload(tmp_path, folder)
    for path, slow in ((folder / "file", True), (tmp_path / "other", False)):
        faults.slow(write_s=0, sync_s=0)
        command = [sys.executable, "-c", CLOCKS.replace("PATH", repr(str(path)))]
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        env = {**os.environ, **faults.environment}
        with subprocess.Popen(command, env=env, text=True, **pipes) as process:
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


def test_lost_score_may_change_later_steps(tmp_path: Path) -> None:
    killed = [Fault("kill", "reward worker", step=4)]

    def different(lost: int, faults: Sequence[Fault]) -> list[int]:
        """A run of 8 steps in which step `lost` counts an error and all later steps differ."""
        for folder in ("one", "other"):
            (tmp_path / folder).mkdir(exist_ok=True)
            lines = [{"step": step, "reward/mean": 0.5} for step in range(9)]
            for line in lines[lost:] if folder == "one" else ():
                line |= {"reward/mean": 0.25, "reward/error": float(line["step"] == lost)}
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (tmp_path / folder / "metrics.jsonl").write_text(text)
        result = compared(tmp_path / "one", tmp_path / "other", faults)
        assert result["equal steps"] == lost - 1
        return result["different, and not due"]

    assert different(9, ()) == []
    assert different(6, killed) == []
    assert different(6, ()) == [6, 7, 8]
    assert different(4, killed) == [4, 5, 6, 7, 8]
