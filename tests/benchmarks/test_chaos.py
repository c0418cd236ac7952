"""Faults of `benchmarks.chaos`, and its verdicts on simulated runs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.chaos import __main__ as chaos
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.means import Means, Preload, preload_unavailable
from benchmarks.chaos.outcome import compared
from benchmarks.common import COMMIT_VARIABLE

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


STEPS, FAULTS = 20, 6
Play = Callable[..., tuple[int, dict[str, Any]]]


@dataclass
class Played:
    reaches: int = STEPS
    differs: Sequence[int] = ()
    """Steps whose metrics differ from the run without faults."""
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Fields by fault; the run survives all other faults."""
    nothing: bool = False
    tried: int = 0


class Run:
    played: Played

    def __init__(self, folder: Path, knobs: Any, steps: int, log: Path, **_: Any) -> None:
        folder.mkdir(parents=True)
        self.folder, self.starts = folder, 1
        with_faults = folder.name != "reference"
        done = self.played.reaches if with_faults else steps
        lines: list[dict[str, Any]] = [{"step": 0}]
        for step in range(1, done + 1):
            off = 0.5 if with_faults and step in self.played.differs else 0.0
            lines.append({"step": step, "reward/mean": step / 100 + off, "grad_norm": 1.0})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.process = SimpleNamespace(returncode=0, wait=lambda timeout: 0)

    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").open()]

    def last(self) -> int:
        return self.steps()[-1]["step"]

    def ended(self) -> bool:
        return self.played.tried >= FAULTS


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    def played(played: Played) -> tuple[int, dict[str, Any]]:
        def suffer(run: Run, fault: Fault, draw: object, means: object) -> bool:
            played.tried += 1
            if played.nothing:
                return False
            fault.again_s = 1.0
            for name, value in played.outcomes.get(fault.name, {}).items():
                setattr(fault, name, value)
            return True

        monkeypatch.setenv(COMMIT_VARIABLE, "abc")
        monkeypatch.setattr(Run, "played", played, raising=False)
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None)
        for name, value in {
            "Run": Run,
            "suffer": suffer,
            "prepared": lambda stack, out: Means(),
            "until": lambda ready, what: None,
            "marked": lambda folder: [],
            "memory": lambda run: {"step": 1.0, "engine": 700.0},
            "time": clock,
        }.items():
            monkeypatch.setattr(chaos, name, value)
        out = tmp_path / "out"
        words = ["chaos", "--out", str(out), "--steps", str(STEPS), *ONLY]
        monkeypatch.setattr(sys, "argv", words)
        return chaos.main(), json.loads((out / "summary.json").read_text())

    return played


ONLY = ("--only", "kill engine", "kill driver", "flip")
FILE = "checkpoints/step_000010/keel_state.json"
DUE = {"kill driver": {"statuses": [-9]}, "flip driver": {"statuses": [-9]}}


def test_allowed_outcomes_are_success(play: Play) -> None:
    flipped = {"statuses": [-9], "flipped": FILE, "named": True}
    status, result = play(Played(outcomes={**DUE, "flip driver": flipped}))
    assert (status, result["wrong"]) == (0, [])
    assert result["faults"] == FAULTS and result["flips"] == {"number": 2, "not named": []}
    assert result["reference"]["equal steps"] == STEPS


@pytest.mark.parametrize(
    ("played", "subject"),
    [
        (Played(outcomes={**DUE, "kill engine": {"statuses": [1]}}), "kill engine"),
        (Played(outcomes={"flip driver": {"statuses": [-9]}}), "kill driver"),
        (Played(outcomes={**DUE, "flip driver": {"statuses": [-9], "flipped": FILE}}), FILE),
        (Played(outcomes=DUE, reaches=10), f"step 10 of {STEPS}"),
        (Played(outcomes=DUE, differs=range(4, STEPS + 1)), f"17 of {STEPS}"),
        (Played(nothing=True), "no fault"),
    ],
)
def test_wrong_outcome_fails_the_command(play: Play, played: Played, subject: str) -> None:
    status, results = play(played)
    assert status == 1
    assert results["wrong"] and all(subject in line for line in results["wrong"])


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
