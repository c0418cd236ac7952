"""`keel.train(prompts=…)`: in place of a recipe's sources, also where it has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import keel
from keel import api
from keel.configs.load import load_config
from keel.configs.schema import Config, ConfigError

ROWS = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "2 + 2?", "answer": "4"}]


@pytest.mark.parametrize(
    "recipe", ["mine.yaml", {"run": {"steps": 3}}, {"data": {"max_prompt_tokens": 64}}]
)
def test_a_recipe_needs_no_source_where_prompts_are_passed(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one in Python nor a file, be there a section `data` or none."""
    seen: list[Config] = []

    def train(path: str, overrides: list[str], **_: Any) -> None:
        seen.append(load_config(path, overrides))
        (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "time": 1.0}\n')

    monkeypatch.setattr(api.main, "train", train)
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("run: {steps: 3}\n")
    knobs = {"run.dir": tmp_path / "run"}
    keel.train(recipe, prompts=ROWS, knobs=knobs)
    (source,) = seen[0].data.sources
    assert [json.loads(line) for line in Path(source.path).read_text().splitlines()] == ROWS
    with pytest.raises(ConfigError, match=r"prompts=….*: must be rows, is one int"):
        keel.train(recipe, prompts=3, knobs=knobs)
