"""`keel replay`: choice of batch and checkpoint, and its output."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel.commands import replay as module
from keel.commands.cli import main
from keel.rl.metrics import Mean, Sum
from keel.rl.types import StepResult
from keel.trainer.run import checkpoint
from keel.trainer.run.batches import save_batch
from keel.trainer.run.checkpoint import State
from tests.rl.rollouts import scored, segment, trajectory

GROUPS = [scored([trajectory(segment(20 * s, 6), sibling=s) for s in (0, 1)], [0.0, 1.0])]


RECIPE = """
model: {path: base}
trainer: {lr: 1.0}
data:
  sources: [{name: sums, source: reasoning_gym, task: chain_sum, size: 10, rewards: {evil.f: 1}}]
"""
"""A recipe whose reward must be imported."""


class FakeLearner:
    """Gradients are finite from the second call on."""

    made: list[FakeLearner]

    def __init__(self, model: str, config: Any, **_: Any) -> None:
        self.events: list[Any] = [model, config.trainer.lr]
        FakeLearner.made.append(self)

    def prepared(self) -> None: ...

    def start(self) -> list[str]:
        return []

    def load(self, folder: Path) -> None:
        self.events.append(folder.name)

    def step(self, groups: Any) -> StepResult:
        (group,) = groups
        self.events.append(group.group.prompt.prompt_id)
        findings = () if len(FakeLearner.made) > 1 else ("p, token 3: nan",)
        metrics = {"loss": Mean(3.0, 2), "train/skipped_steps": Sum(float(bool(findings)))}
        return StepResult(version=1, metrics=metrics, findings=findings)

    def shutdown(self) -> None:
        self.events.append("end")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder, and `keel replay` without Ray."""
    (tmp_path / "config.yaml").write_text(RECIPE)
    FakeLearner.made = []

    def plan_model(config: Any, left: Any, hardware: Any, *, chats: bool) -> Any:
        return SimpleNamespace(config=config, hardware=SimpleNamespace(gpu=False))

    for name, value in {
        "start_ray": lambda: None,
        "stop_ray": lambda: None,
        "start_watchdog": lambda say, hang_timeout_s: nullcontext(),
        "plan_model": plan_model,
        "Learner": FakeLearner,
    }.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("keel.commands.cli.find_spec", lambda name: name)
    return tmp_path


def saved(run: Path, step: int) -> Path:
    state = State(step=step, version=step, config="c")
    return checkpoint.save(run / "checkpoints", state, lambda _: {}, keep=9)


def test_newest_batch_uses_the_checkpoint_before_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (3, 7):
        save_batch(run, step, GROUPS, ["p, token 3: was nan"])
    for step in (2, 6, 7):
        saved(run, step)
    assert main(["replay", str(run)]) == 0
    output = capsys.readouterr().out
    assert "step_000007.npz: 1 groups, 2 completions, from step_000006, the weights" in output
    assert "then: p, token 3: was nan\n" in output and "now: p, token 3: nan\n" in output
    assert "loss                             1.5\n" in output
    assert main(["replay", str(run), "3", "trainer.lr=2"]) == 0
    assert "now: the gradient is finite\n" in capsys.readouterr().out
    assert main(["replay", str(run), "trainer.lr=3"]) == 0
    assert "step_000007.npz" in capsys.readouterr().out and FakeLearner.made.pop().events[1] == 3.0
    assert "evil" not in sys.modules
    first, second = (learner.events for learner in FakeLearner.made)
    assert first == ["base", 1.0, "step_000006", "p", "end"]
    assert second == ["base", 2.0, "step_000002", "p", "end"]
