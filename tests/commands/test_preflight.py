"""Checks of files, models and rewards before libraries load."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.commands.preflight import SOON, check_continued, check_named
from keel.configs.load import dump_config, load_config, load_recipe
from keel.configs.schema import ConfigError


def said(folder: Path, *overrides: str, recipe: str = "quickstart", command: str = "check") -> str:
    try:
        check_named(load_config(recipe, [f"run.dir={folder / 'run'}", *overrides]), command)
    except ConfigError as error:
        return str(error)
    return ""


def source(path: str, more: str = "columns: {prompt: question}", kind: str = "file") -> str:
    return f"data.sources=[{{name: s, source: {kind}, path: {path}, {more}}}]"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("keel.model.hub.hub_answers", lambda: False)


def test_files_must_exist_and_small_ones_parse(tmp_path: Path) -> None:
    table = tmp_path / "sums.csv"
    table.write_text("question,answer\nWhat is 1 + 1?,2\n")
    assert said(tmp_path, source("sums.csv")) == ""
    assert "no such file" in said(tmp_path, source("sumz.csv"))
    wrong = said(tmp_path, source("sums.csv", "columns: {prompt: qestion}"))
    assert "columns.prompt = 'qestion'" in wrong and "has question, answer" in wrong
    folder = tmp_path / "gsm"
    folder.mkdir()
    assert "no file of a known kind" in said(tmp_path, source("gsm"))
    (folder / "train.csv").write_text("question,answer\nWhat is 1 + 1?,\n")
    assert "train.csv:2" in said(tmp_path, source("gsm"))
    (folder / "test.csv").write_bytes(b" " * (SOON + 1))
    assert said(tmp_path, source("gsm")) == ""  # deferred, because it is slow


def test_missing_local_model_is_not_a_hub_name(tmp_path: Path) -> None:
    (tmp_path / "models" / "qwen3").mkdir(parents=True)
    assert "models/qwen4" in said(tmp_path, "model.path=models/qwen4")
    assert said(tmp_path, "model.path=Qwen/Qwen3-0.6B") == ""  # deferred, because it needs the hub
    (tmp_path / "weights").write_text("")
    assert "is a file" in said(tmp_path, "model.path=weights")


def test_incompatible_resume_is_refused_early(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step_000002").mkdir(parents=True)
    run_dir = f"run.dir={run}"
    # Resolved for the CPU of the first start.
    saved = dump_config(load_config("quickstart", [run_dir, "model.dtype=float16"]))
    (run / "config.yaml").write_text(saved)
    quickstart = [run_dir, "model.dtype=auto"]
    check_continued(*load_recipe("quickstart", quickstart))
    check_continued(*load_recipe("quickstart", [*quickstart, "trainer.lr=1e-9"]))
    with pytest.raises(ConfigError, match=r"algorithm\.group_size: 8 → 4"):
        check_continued(*load_recipe("quickstart", [*quickstart, "algorithm.group_size=4"]))
    other = [f"run.dir={tmp_path / 'new'}", "algorithm.group_size=4"]
    check_continued(*load_recipe("quickstart", other))


def test_missing_reward_module_is_named(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("raise SystemExit('is not imported yet')\n")

    def weighed(part: str) -> str:
        return said(tmp_path, f"data.sources[spiral].rewards={{{part}: 1}}")

    assert "my_reward" in weighed("my_reward.brief")
    assert weighed("my_rewards.brief") == weighed("random.random") == ""
    assert "MODULE.FUNCTION" in weighed("'./my_rewards.py:brief'")
