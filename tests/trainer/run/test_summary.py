"""What a command says when it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from keel.configs.load import load_config
from keel.trainer.run import summary as words
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.summary import closing_summary


def test_the_command_for_the_curves_takes_a_folder_with_spaces(tmp_path: Path) -> None:
    path = tmp_path / "my run"
    config = load_config("quickstart", [f"run.dir={path}"])
    with RunFolder(config) as folder:
        said = closing_summary(folder, config, 1, ["train", "quickstart"])
    assert f"tensorboard --logdir '{path}'" in said


def test_a_run_that_stopped_says_how_to_go_on(tmp_path: Path) -> None:
    """Also in its first evaluation, when there is no line of metrics."""
    config = load_config("quickstart", [f"run.dir={tmp_path}"])
    with RunFolder(config) as folder:
        command = ["train", "my recipe.yaml"]
        said = closing_summary(folder, config, 1, command)
        from_python = closing_summary(folder, config, 1, command, again="make the same call again")
    assert "after step 1 of 60; to go on: keel train 'my recipe.yaml'\n" in said
    assert "after step 1 of 60; to go on: make the same call again\n" in from_python
    assert "to export it now: the same with the knob run.steps=1\n" in from_python
    end = "to export it now: keel train 'my recipe.yaml' run.steps=1\n"
    assert end in said
    with RunFolder(config) as folder:
        assert "nothing was trained or saved" in closing_summary(folder, config, 0, command)
    by_epochs = replace(config, sft=replace(config.sft, epochs=2.0))
    with RunFolder(config) as folder:
        assert end in closing_summary(folder, by_epochs, 1, command)
        assert "export it" not in closing_summary(folder, by_epochs, 1, ["sft", "my recipe.yaml"])


def test_a_set_of_which_nothing_is_wholly_right_has_its_score_said(tmp_path: Path) -> None:
    """By a function of the user's that gives parts of 1; `pass@1` alone would say that nothing has
    come of it."""
    config = load_config("quickstart", [f"run.dir={tmp_path}"])
    lines = [
        {"step": 0, "eval/sums/pass@1": 0.0, "eval/sums/score": 0.06, "eval/chains/pass@1": 0.5},
        {"step": 60, "eval/sums/pass@1": 0.0, "eval/sums/score": 0.28, "eval/chains/score": 0.6},
    ]
    with RunFolder(config) as folder:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(it) + "\n" for it in lines))
        said = closing_summary(folder, config, 60, ["train", "quickstart"])
    assert "held-out sums/score: 0.060 at step 0, 0.280 at step 60 (+0.220)\n" in said
    assert "chains/score" not in said


@pytest.mark.parametrize(
    ("started", "on_path", "expected"),
    [
        (".venv/bin/keel", False, ".venv/bin/keel report "),
        (".venv/bin/keel", True, "keel report "),
        ("keel/__main__.py", False, "keel report "),
    ],
)
def test_commands_are_printed_as_they_can_be_typed(
    started: str, on_path: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [started, "train"])
    monkeypatch.setattr(words, "which", lambda _: "/usr/bin/keel" if on_path else None)
    config = load_config("quickstart", [f"run.dir={tmp_path}"])
    with RunFolder(config) as folder:
        text = closing_summary(folder, config, 60, ["train", "quickstart"])
    assert f" {expected}" in text
