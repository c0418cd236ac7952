"""`keel.train(prompts=…)`: in place of a recipe's sources, also where it has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import keel
from keel.commands import api
from keel.configs.load import load_config
from keel.configs.schema import Config, ConfigError, RolloutConfig

ROWS = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "2 + 2?", "answer": "4"}]


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The recipes that `keel.train` would have run, in `tmp_path / "run"`."""
    found: list[Config] = []

    def train(path: str, overrides: list[str], **_: Any) -> None:
        found.append(load_config(path, overrides))
        (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "time": 1.0}\n')

    monkeypatch.setattr(api.main, "train", train)
    return found


@pytest.mark.parametrize(
    "recipe", ["mine.yaml", {"run": {"steps": 3}}, {"data": {"max_prompt_tokens": 64}}]
)
def test_a_recipe_needs_no_source_where_prompts_are_passed(
    recipe: Any, seen: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one in Python nor a file, be there a section `data` or none."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("run: {steps: 3}\n")
    knobs = {"run.dir": tmp_path / "run"}
    keel.train(recipe, prompts=ROWS, knobs=knobs)
    (source,) = seen[0].data.sources
    assert [json.loads(line) for line in Path(source.path).read_text().splitlines()] == ROWS
    with pytest.raises(ConfigError, match=r"prompts=….*: must be rows, is one int"):
        keel.train(recipe, prompts=3, knobs=knobs)


def test_knobs_by_their_sections_leave_the_others_as_they_are(
    seen: list[Config], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    folder = tmp_path / "run"
    nested = {"run": {"dir": folder, "steps": 7}, "rollout": {"sampling": {"max_tokens": 99}}}
    dotted = {"run.dir": folder, "run.steps": 7, "rollout.sampling.max_tokens": 99}
    for knobs in (nested, dotted, {"run": nested["run"], "rollout.sampling": {"max_tokens": 99}}):
        keel.train("quickstart", knobs=knobs)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0].run.steps == 7 and seen[0].rollout.sampling.max_tokens == 99
    of_the_recipe = load_config("quickstart").rollout
    assert seen[0].rollout.engines == of_the_recipe.engines != RolloutConfig().engines
    assert seen[0].rollout.sampling.top_k == of_the_recipe.sampling.top_k != 0
    keel.train("quickstart", prompts=ROWS, knobs={**nested, "data": {"max_prompt_tokens": 99}})
    assert [source.name for source in seen[3].data.sources] == ["prompts"]
    for knobs in ({**nested, "data": {"sources": []}}, [f"run.dir={folder}", "data={sources: []}"]):
        with pytest.raises(ConfigError, match=r"knobs=data\.sources\): keep one"):
            keel.train("quickstart", prompts=ROWS, knobs=knobs)
