"""Resuming an evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.configs.load import load_config
from keel.data.eval_store import Asked, EvaluationFolder


@pytest.mark.parametrize(
    "override",
    [
        "data.sources[spelling].budget.max_tokens=40",
        "data.max_prompt_tokens=70",
        "rollout.timeout_s=77",
        "eval.temperature=0.3",
    ],
)
def test_settings_of_an_evaluation(override: str, tmp_path: Path) -> None:
    def settings(*overrides: str) -> object:
        config = load_config("quickstart", [f"run.dir={tmp_path}", *overrides])
        return EvaluationFolder(config, "the model", "model")._settings

    assert settings("run.steps=7", "data.sources[spelling].weight=2") == settings()
    assert settings(override) != settings()


def test_progress(tmp_path: Path) -> None:
    config = load_config("quickstart", [f"run.dir={tmp_path}"])

    def asked(number: int, *correct: float, missing: int = 0) -> Asked:
        return Asked(
            variant="recipe",
            source="s",
            domain="d",
            id=f"s/{number}",
            digest="x",
            samples=[{"correct": one} for one in correct],
            missing=["late"] * missing,
        )

    with EvaluationFolder(config, "the model", "model") as out:
        out.add(asked(0, 1.0, 0.0))
        out.add(asked(1, 1.0, missing=1))
        assert out.progress() == "pass@1 so far 0.500"
    with EvaluationFolder(config, "the model", "model") as out:
        out.add(asked(2, 1.0))
        assert out.progress() == "pass@1 so far 0.600" and len(out.asked) == 3
