"""Resuming an evaluation."""

from pathlib import Path

from keel.configs.load import load_config
from keel.data.eval_store import Asked, EvaluationFolder


def test_settings_of_an_evaluation(tmp_path: Path) -> None:
    def settings(*overrides: str) -> object:
        config = load_config("quickstart", [f"run.dir={tmp_path}", *overrides])
        return EvaluationFolder(config, "the model", "model")._settings

    assert settings("run.steps=7", "data.sources[spelling].weight=2") == settings()
    for knob in ("data.sources[spelling].budget.max_tokens=40", "rollout.timeout_s=77"):
        assert settings(knob) != settings()
    for knob in ("data.max_prompt_tokens=70", "eval.temperature=0.3"):
        assert settings(knob) != settings()


def test_progress(tmp_path: Path) -> None:
    config = load_config("quickstart", [f"run.dir={tmp_path}"])
    known = {"variant": "recipe", "source": "s", "domain": "d", "digest": "x"}

    def asked(number: int, *correct: float, missing: int = 0) -> Asked:
        samples = [{"correct": one} for one in correct]
        return Asked(**known, id=f"s/{number}", samples=samples, missing=["late"] * missing)

    with EvaluationFolder(config, "the model", "model") as out:
        out.add(asked(0, 1.0, 0.0))
        out.add(asked(1, 1.0, missing=1))
        assert out.progress() == "pass@1 so far 0.500"
    with EvaluationFolder(config, "the model", "model") as out:
        out.add(asked(2, 1.0))
        assert out.progress() == "pass@1 so far 0.600" and len(out.asked) == 3
