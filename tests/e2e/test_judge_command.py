"""`keel judge` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keel.commands.cli import main
from tests.rewards.judge.judge_server import good, running

pytestmark = pytest.mark.e2e


def test_answers_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = tmp_path / "a.jsonl"
    answers.write_text(json.dumps({"prompt": "Colour?", "answer": "blue"}) + "\n")
    rubric = tmp_path / "r.yaml"
    rubric.write_text("- {name: blue, text: says blue, weight: 1}\n")
    with running(good) as server:
        options = ["--rubric", str(rubric), "--base-url", server.url, "--model", "m"]
        assert main(["judge", str(answers), *options]) == 0
    assert "mean score 1.000" in capsys.readouterr().out
    assert json.loads(Path(f"{answers}.judged.jsonl").read_text())["score"] == 1.0
    rubric.write_text("- {name: blue, text: says blue, weight: 2}\n")
    options = ["--rubric", str(rubric), "--base-url", "http://h/v1", "--model", "m"]
    assert main(["judge", str(answers), *options]) == 2
    assert "must sum to 1" in capsys.readouterr().err


def test_without_a_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", str(tmp_path / "a.jsonl")]) == 2
    assert "--base-url" in capsys.readouterr().err
