"""Resuming a run with changed data or with data of another model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keel.commands.cli import main
from keel.trainer.prepare import prepare
from keel.trainer.run.checkpoint import State, config_digest
from keel.trainer.run.folder import RunFolder


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
