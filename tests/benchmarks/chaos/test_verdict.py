"""Verdicts of `benchmarks.chaos` on simulated runs."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.chaos import __main__ as chaos
from benchmarks.chaos import faults
from benchmarks.chaos.faults import Fault, Means, Struck, due, flip, named, suffer
from benchmarks.chaos.outcome import compared
from benchmarks.chaos.run import Refused
from benchmarks.chaos.run import Run as Started
from benchmarks.common import COMMIT_VARIABLE

STEPS, FAULTS = 20, 6
Play = Callable[..., tuple[int, dict[str, Any]]]


@dataclass
class Played:
    """Scripted outcome of a run and of its faults."""

    reaches: int = STEPS
    differs: Sequence[int] = ()
    """Steps whose metrics differ from the run without faults."""
    reference: int = 0
    """Exit status of the run without faults."""
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Fields by fault; the run survives all other faults."""
    meets: BaseException | None = None
    """Exception raised by the third fault."""
    nothing: bool = False
    """True if no fault finds a target."""
    tried: int = 0
    """Number of `FAULTS` injected so far."""


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
            line = {"step": step, "reward/mean": step / 100 + off, "grad_norm": 1.0}
            lines.append(line)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        status = 0 if with_faults else self.played.reference
        self.process = SimpleNamespace(returncode=status, wait=lambda timeout: status)

    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").open()]

    def last(self) -> int:
        return self.steps()[-1]["step"]

    def ended(self) -> bool:
        return self.played.tried >= FAULTS


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    def played(played: Played, *options: str) -> tuple[int, dict[str, Any]]:
        def suffer(run: Run, fault: Fault, draw: object, means: object) -> bool:
            played.tried += 1
            if played.nothing:
                return False
            if played.meets and played.tried == 3:
                raise played.meets
            fault.again_s = 1.0
            for name, value in played.outcomes.get(fault.name, {}).items():
                setattr(fault, name, value)
            return True

        monkeypatch.setenv(COMMIT_VARIABLE, "abc")
        monkeypatch.setattr(Run, "played", played, raising=False)
        monkeypatch.setattr(chaos, "Run", Run)
        monkeypatch.setattr(chaos, "suffer", suffer)
        monkeypatch.setattr(chaos, "prepared", lambda stack, out: Means())
        monkeypatch.setattr(chaos, "until", lambda ready, what: None)
        monkeypatch.setattr(chaos, "marked", lambda folder: [])
        monkeypatch.setattr(chaos, "memory", lambda run: {"step": 1.0, "engine": 700.0})
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None)
        monkeypatch.setattr(chaos, "time", clock)
        out = tmp_path / "out"
        words = ["chaos", "--out", str(out), "--steps", str(STEPS), *options]
        monkeypatch.setattr(sys, "argv", words)
        return chaos.main(), json.loads((out / "summary.json").read_text())

    return played


ONLY = ("--only", "kill engine", "kill driver", "flip")
FILE = "checkpoints/step_000010/keel_state.json"
DUE = {"kill driver": {"statuses": [-9]}, "flip driver": {"statuses": [-9]}}


def test_allowed_outcomes_are_success(play: Play) -> None:
    flipped = {"statuses": [-9], "flipped": FILE, "named": True}
    status, result = play(Played(outcomes={**DUE, "flip driver": flipped}), *ONLY)
    assert (status, result["wrong"]) == (0, [])
    assert result["faults"] == FAULTS and result["flips"] == {"number": 2, "not named": []}
    assert result["reference"]["equal steps"] == STEPS


@pytest.mark.parametrize(
    ("played", "subject"),
    [
        (Played(outcomes={**DUE, "kill engine": {"statuses": [1]}}), "kill engine"),
        (Played(outcomes={"flip driver": {"statuses": [-9]}}), "kill driver"),
        (Played(outcomes={**DUE, "kill driver": {"statuses": [-9, 1]}}), "kill driver"),
        (Played(outcomes={**DUE, "flip driver": {"statuses": [-9], "flipped": FILE}}), FILE),
        (Played(outcomes=DUE, reaches=10), f"step 10 of {STEPS}"),
        (Played(outcomes=DUE, differs=range(4, STEPS + 1)), f"17 of {STEPS}"),
        (Played(outcomes=DUE, reference=1), "status 1"),
        (Played(nothing=True), "no fault"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_outcome_fails_the_command(play: Play, played: Played, subject: str) -> None:
    status, results = play(played, *ONLY)
    assert status == 1
    assert results["wrong"] and all(subject in line for line in results["wrong"])


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (TimeoutError("no step in 1800 s of a fault"), "no step in 1800 s of a fault"),
        (KeyboardInterrupt(), "Ctrl-C"),
        (ZeroDivisionError(), "an error of this benchmark"),
    ],
    ids=["a run that hangs", "Ctrl-C", "an error"],
)
def test_interrupted_run_keeps_its_record(
    play: Play, tmp_path: Path, error: BaseException, why: str
) -> None:
    with suppress(ZeroDivisionError):
        assert play(Played(outcomes=DUE, meets=error), *ONLY)[0] == 1
    out = tmp_path / "out"
    result = json.loads((out / "summary.json").read_text())
    assert result["wrong"] == [f"broken off: {why}"] and "reference" not in result
    written = [json.loads(line) for line in (out / "faults.jsonl").open()]
    assert len(written) == result["faults"] == 3
    assert len((out / "memory.jsonl").read_text().splitlines()) == 3


def test_refused_command_makes_no_folder(
    play: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit):
        play(Played(), "--only", "kil engine")
    assert "--only" in capsys.readouterr().err and not out.exists()
    out.mkdir()
    with pytest.raises(SystemExit):
        play(Played())
    assert list(out.iterdir()) == []


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


def test_repeated_engine_loss_may_end_the_run() -> None:
    lost = [Fault("kill", "engine", step=step, start=2) for step in range(3)]
    fourth = Fault("freeze", "engine", step=9, start=2)
    assert due(fourth, lost) == (None, 1)
    assert due(fourth, lost[1:]) == (None,)
    assert due(Fault("kill", "engine", step=9, start=3), lost) == (None,)
    assert due(Fault("kill", "raylet", step=9, start=2), []) == (1,)


def test_only_a_spare_checkpoint_is_damaged(tmp_path: Path) -> None:
    draw = random.Random(0)
    for step in (5, 10):
        assert flip(tmp_path, draw) == ""
        folder = tmp_path / f"checkpoints/step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "empty").touch()
        (folder / "state").write_bytes(b"state")
    assert flip(tmp_path, draw) == "checkpoints/step_000010/state"
    changed = (tmp_path / "checkpoints/step_000010/state").read_bytes()
    assert sum((a ^ b).bit_count() for a, b in zip(b"state", changed, strict=True)) == 1
    line = f"warning: {tmp_path}/checkpoints/step_000010 is damaged (state: changed): it is kept"
    assert named("checkpoints/step_000010/state", ["resumed", line])
    assert not named("checkpoints/step_000005/state", [line])
    assert not named("", [line])


def test_hanging_run_keeps_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "strike", lambda *_: Struck())
    monkeypatch.setattr(faults, "TIMEOUT_S", -1.0)
    run: Any = SimpleNamespace(
        starts=4,
        position=lambda: 0,
        fresh=lambda: 0,
        ended=lambda: False,
        messages=lambda since: ["an engine is gone"],
    )
    fault = Fault("kill", "engine", step=7)
    with pytest.raises(TimeoutError, match="an engine is gone"):
        suffer(run, fault, random.Random(0), Means())
    assert (fault.words, fault.start) == (["an engine is gone"], 4)


def test_refused_run_is_not_restarted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Started, "start", lambda self: None)
    log = tmp_path / "log.txt"
    run = Started(tmp_path / "run", (), 5, log, environment={})
    monkeypatch.undo()
    log.write_text("keel train: trainer.lrr is no knob\n")
    run.starts, run.process = 1, SimpleNamespace(returncode=2)  # type: ignore[assignment]
    with pytest.raises(Refused, match=r"status 2: .*no knob"):
        run.start()
