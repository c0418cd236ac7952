"""The loop with real parts and few fakes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel.commands.cli import main
from keel.commands.train import run_loop
from keel.configs.schema import ConfigError
from keel.rl.metrics import Mean
from keel.trainer.prepare import Task, prepare
from keel.trainer.run.checkpoint import SaveError, State, config_digest
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.restarts import CollectiveTimeout
from keel.trainer.run.view import PlainView

FEW = tuple(f"data.sources.{i}.{knob}" for i in (0, 1) for knob in ("size=32", "holdout=8"))


def system_of(task: Task, **parts: Any) -> Any:
    """The parts of a started system that the loop uses."""
    return SimpleNamespace(
        **{
            "task": task,
            "learner": None,
            "pool": SimpleNamespace(),
            "oom_recovery": None,
            "weights": SimpleNamespace(push=lambda _: None),
            "agents": None,
            "scorer": SimpleNamespace(tell=lambda say: None),
            "watchdog": None,
            "gpus": 0,
            "with_watchdog": lambda hurry: hurry,
            **parts,
        }
    )


def test_stop_below_alarm_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = ("run.eval_every=1", "alarms.stop_below={spelling: 0.5}")
    words = (f"run.dir={tmp_path}", *below, *FEW)
    task = prepare("quickstart", words)

    def full(folder: Path) -> object:
        raise SaveError(f"{folder}: no space")

    system = system_of(task, learner=SimpleNamespace(tokens={}, version=2, save=full))

    def two_steps(parts: Any, config: object, *, start: int) -> int:
        parts.journal.record(1, {"eval/spelling/pass@1": Mean(5, 10)}, [])
        assert not parts.handle_failure(CollectiveTimeout("rank 0 failed"))
        assert not parts.should_stop()
        parts.journal.record(2, {"eval/spelling/pass@1": Mean(4, 10)}, [])
        assert parts.should_stop()
        with pytest.raises(SaveError):  # no other evaluation follows
            parts.save(2, {})
        return 2

    monkeypatch.setattr("keel.trainer.loop.train", two_steps)
    with (
        RunFolder(task.config) as folder,
        pytest.raises(RuntimeError, match=r"spelling/pass@1 is 0.400.* checkpoint of step 2"),
    ):
        run_loop(system, folder, PlainView(60), 0)
    assert '"kind": "alarm"' in (tmp_path / "events.jsonl").read_text()
    folder.check_heldout(1)
    with pytest.raises(ConfigError, match=r"spelling = 0.5: pass@1 was 0.400 at step 2"):
        folder.check_heldout(2)


def write(path: Path, count: int) -> None:
    lines = [json.dumps({"prompt": f"Say {n}.", "answer": str(n)}) for n in range(count)]
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("command", ["check", "train"])
def test_resume_with_other_data_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run, recipe = tmp_path / "sums.jsonl", tmp_path / "run", tmp_path / "recipe.yaml"
    recipe.write_text(
        "defaults: quickstart\n"
        f"run: {{dir: {run}, steps: 3}}\n"
        "model: {tiny: {cold_start: {steps: 0}}}\n"
        "data:\n"
        f"  sources: [{{name: sums, source: jsonl, path: {data}}}]\n"
    )
    write(data, 20)
    task = prepare(str(recipe), ())
    with RunFolder(task.config) as folder:
        cursor, digest = task.dataset.train.state(), config_digest(task.config)
        folder.save(State(step=1, version=1, cursor=cursor, config=digest), lambda _: {})
    (run / "metrics.jsonl").touch()
    assert main(["check", str(recipe)]) == 0
    write(data, 15)
    capsys.readouterr()
    assert main([command, str(recipe)]) == 2
    output = capsys.readouterr().err
    assert f"run.dir = {run}: step 1: the saved state belongs to other data" in output
    assert "model.path" in output
