"""Resuming a run with changed data or with data of another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keel.commands.cli import main
from keel.configs.schema import ConfigError
from keel.trainer.prepare import prepare, prepare_sft
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


@pytest.mark.parametrize("wrong", [10**6, -1])
def test_foreign_token_ids_are_refused(wrong: int, tmp_path: Path) -> None:
    """Models of one tokenizer may have vocabularies of different sizes."""
    path, recipe = tmp_path / "step_000001.jsonl", tmp_path / "recipe.yaml"
    recipe.write_text(
        f"run: {{dir: {tmp_path / 'run'}, device: cpu}}\n"
        "model: {path: tiny, dtype: float32}\n"
        "sft:\n  max_context_tokens: 64\n"
        f"  sources: [{{name: own, source: trajectories, path: {path}}}]\n"
    )
    question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    line: dict[str, Any] = {"messages": [question, answer], "parts": {"correct": 1.0}}
    path.write_text(json.dumps(line))
    line["tokenizer"] = prepare_sft(str(recipe), ()).tokenizer_digest
    for last in (3, wrong):
        line["segments"] = [{"ids": [1, 2, last], "said": [[2, 3]]}]
        path.write_text(json.dumps(line))
        if last == 3:
            assert prepare_sft(str(recipe), ()).lessons.report["own"].sampled == 1
    with pytest.raises(ConfigError, match=rf"step_000001\.jsonl:1 has token id {wrong}, "):
        prepare_sft(str(recipe), ())
