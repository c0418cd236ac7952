"""Recipes that come along are found by their names and listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.configs.load import load_config, load_distillation
from keel.configs.schema import ConfigError
from keel.configs.shipped import FOLDERS, HERE, about, listed, shipped


def test_every_recipe_is_listed_with_a_line_of_its_own() -> None:
    said = listed()
    files = [file for folder in FOLDERS for file in HERE.glob(f"{folder}*.yaml")]
    assert len(files) == len(list(HERE.rglob("*.yaml"))) > 30
    for file in files:
        assert f"\n  {file.stem} " in said
        assert 10 < len(about(file)) < 240, f"{file}: its first sentence says what it is"


def test_a_name_is_printed_whole_or_answered_with_the_nearest() -> None:
    assert "model: {path: Qwen/Qwen3-8B}" in listed("qwen3-8b-8x80")
    assert "specialists:" in listed("specialists") or "sources:" in listed("specialists")
    with pytest.raises(ConfigError, match="no such recipe; did you mean qwen3-8b-8x80"):
        listed("qwen3-8b-8x8")


def test_a_folder_is_no_recipe_unless_it_is_a_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r": is a folder; name a YAML file, or a bundled recipe"):
        load_config(tmp_path)
    (tmp_path / "list.yaml").touch()  # which is written much like it
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^quickstart\.yml: no such file; did you mean quickst"):
        load_config("quickstart.yml")
    (tmp_path / "config.yaml").write_text("defaults: quickstart\nrun: {steps: 7}\n")
    assert load_config(tmp_path).run.steps == 7


def test_names_of_the_shelf_are_enough(tmp_path: Path) -> None:
    config = load_config("qwen3-8b-8x80")
    assert config.run.dir == "runs/qwen3-8b-8x80" and config.run.gpus_per_node == 8
    assert not set(shipped("distill/")) - {"quickstart", "specialists"}
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: qwen3-8b-8x80\nrun: {dir: runs/mine}\n")
    assert load_config(mine).trainer == config.trainer
    # What lies beside a recipe comes first, and what is nowhere is said of there.
    (tmp_path / "quickstart.yaml").write_text("run: {steps: 7}\n")
    mine.write_text(
        "defaults: quickstart.yaml\ndata: {sources: [{name: a, source: jsonl, path: a}]}\n"
    )
    assert load_config(mine).run.steps == 7
    mine.write_text("defaults: qwen3-8b-9x80\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:1: defaults: .*qwen3-8b-9x80: no such file"):
        load_config(mine)


def test_a_distillation_starts_from_chains_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_distillation("qwen3-8b-8x80")
