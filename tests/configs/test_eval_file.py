"""`eval.file`: an evaluation set by file."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.configs.load import dump_config, load_config

RECIPE = """
data:
  sources:
    - {name: school, source: file, path: school.csv, columns: {prompt: question}, holdout: 8,
       template: boxed, rewards: {correct: 1.0, my.brief: 0.1}, weight: 2.0, size: 50}
"""


def test_an_evaluation_file_is_read_like_the_first_file(tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text(RECIPE)
    config = load_config(recipe, ["eval.file=sets/test.jsonl"])
    school, test = config.data.sources
    assert (test.name, test.source, test.path) == ("test", "jsonl", "sets/test.jsonl")
    assert test.holdout == "all" and config.data.weight_of(test) == 0
    for knob in ("columns", "template", "rewards", "thinking"):
        assert getattr(test, knob) == getattr(school, knob)
    assert (test.size, school.weight) == (0, 2)
    again = tmp_path / "config.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config, "the run's own recipe has it as a source"


def test_an_evaluation_file_is_kept_beside_the_only_sources(tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text(f"{RECIPE}    - {{name: other, source: jsonl, path: other.jsonl}}\n")
    config = load_config(recipe, ["eval.file=sets/test.jsonl", "data.only=[school]"])
    assert [one.name for one in config.data.sources] == ["school", "test"]


@pytest.mark.parametrize(
    ("file", "name"), [("spelling.parquet", "spelling-eval"), ("a/b.csv.gz", "b")]
)
def test_a_recipe_without_files_takes_the_files_columns_as_they_are(file: str, name: str) -> None:
    *_, last = load_config("quickstart", [f"eval.file={file}"]).data.sources
    assert (last.name, last.source, dict(last.columns)) == (name, "file", {})
