"""Files and folders: run folders, work folders, recipes that come with Keel, system prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.configs.load import load_config, load_distillation
from keel.configs.paths import unwritable
from keel.configs.schema import ConfigError
from keel.configs.shipped import shipped
from keel.configs.system_prompts import with_system
from keel.configs.work_folder import WorkFolder


def test_obstacles_of_a_run_folder_are_named(tmp_path: Path) -> None:
    assert unwritable(tmp_path / "a" / "b") == unwritable(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for inside in ("file", "file/run", "file/a/run"):
        assert str(tmp_path / "file") in unwritable(tmp_path / inside)
    assert str(tmp_path / "link") in unwritable(tmp_path / "link" / "run")
    assert unwritable(tmp_path / ("x" * 300))


def work_folder(path: Path) -> WorkFolder:
    return WorkFolder(path, "it.dir", "count")


def test_work_folder_resumes_after_the_last_whole_line(tmp_path: Path) -> None:
    line = {"text": "é \ud800", "n": 1}
    with work_folder(tmp_path) as folder:
        folder.claim({"seed": 1})
        folder.lines("x.jsonl").add(line)
    with (tmp_path / "x.jsonl").open("ab") as file:
        file.write('{"text": "é'.encode()[:-1])  # cut inside a character
    with work_folder(tmp_path) as folder:
        assert folder.changed({"seed": 1}) == []
        assert folder.changed({"seed": 2, "k": 3}) == ["seed: 1 → 2", "k: (absent) → 3"]
        lines = folder.lines("x.jsonl")
        assert lines.read() == [line]
        lines.add([2])
        assert lines.read() == [line, [2]]


def test_work_folder_is_exclusive_and_names_bad_files(tmp_path: Path) -> None:
    with work_folder(tmp_path / "a"), pytest.raises(ConfigError, match=r"it\.dir"):
        work_folder(tmp_path / "a").__enter__()
    with work_folder(tmp_path / "a") as folder:  # released
        (folder.path / "settings.json").write_text("{")
        with pytest.raises(ConfigError, match=r"settings\.json"):
            folder.changed({})
        (folder.path / "x.jsonl").write_text("{}\n{]\n")
        with pytest.raises(ValueError, match=r"x\.jsonl:2: "):
            folder.lines("x.jsonl").read()
        (folder.path / "y.jsonl").mkdir()
        with pytest.raises(ConfigError, match=r"y\.jsonl"):
            folder.lines("y.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"it\.dir"):
        work_folder(tmp_path / "file").__enter__()


def test_neighbouring_files_precede_shipped_recipes(tmp_path: Path) -> None:
    config = load_config("qwen3-8b-8x80")
    assert config.run.dir == "runs/qwen3-8b-8x80" and config.run.gpus_per_node == 8
    assert set(shipped("distill/")) == {"quickstart", "specialists"}
    with pytest.raises(ConfigError, match="no such file"):
        load_distillation("qwen3-8b-8x80")
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: qwen3-8b-8x80\nrun: {dir: runs/mine}\n")
    assert load_config(mine).trainer == config.trainer
    (tmp_path / "quickstart.yaml").write_text("run: {steps: 7}\n")
    mine.write_text(
        "defaults: quickstart.yaml\ndata: {sources: [{name: a, source: jsonl, path: a}]}\n"
    )
    assert load_config(mine).run.steps == 7
    mine.write_text("defaults: qwen3-8b-9x80\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:1: defaults: "):
        load_config(mine)


def test_system_prompt_precedes_an_existing_message() -> None:
    user = {"role": "user", "content": "1 + 1?"}
    assert with_system("", [user]) == (user,)
    assert with_system("A", [user]) == ({"role": "system", "content": "A"}, user)
    system = {"role": "system", "content": "B"}
    assert with_system("A", [system, user]) == ({"role": "system", "content": "A\n\nB"}, user)
