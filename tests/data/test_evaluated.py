"""What an evaluation that was stopped may go on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.configs.load import load_config
from keel.data.evaluated import EvaluationFolder


@pytest.mark.parametrize(
    "override",
    [
        "data.sources[spelling].budget.max_tokens=40",
        "data.sources[spelling].length.truncated=zero",
        "data.max_prompt_tokens=70",
        "rollout.deadline_s=77",
        "eval.temperature=0.3",
    ],
)
def test_completions_of_other_settings_are_not_taken_over(override: str, tmp_path: Path) -> None:
    def settings(*overrides: str) -> object:
        config = load_config("quickstart", [f"run.dir={tmp_path}", *overrides])
        return EvaluationFolder(config, "the model", "model")._settings

    assert settings("run.steps=7", "data.sources[spelling].weight=2") == settings()
    assert settings(override) != settings()
