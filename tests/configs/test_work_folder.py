"""A folder that a command fills line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.configs.schema import ConfigError
from keel.configs.work_folder import WorkFolder


def folder(path: Path) -> WorkFolder:
    return WorkFolder(path, "it.dir", "count")


def test_a_stopped_command_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    said = {"text": "é \ud800", "n": 1}
    with folder(tmp_path / "a") as held:
        held.claim({"seed": 1})
        held.lines("x.jsonl").add(said)
    with (tmp_path / "a" / "x.jsonl").open("ab") as file:
        file.write('{"text": "é'.encode()[:-1])  # in the middle of a character
    with folder(tmp_path / "a") as held:
        assert held.changed({"seed": 1}) == []
        assert held.changed({"seed": 2, "k": 3}) == ["seed: 1 → 2", "k: (absent) → 3"]
        lines = held.lines("x.jsonl")
        assert lines.read() == [said]
        lines.add([2])
        assert lines.read() == [said, [2]]


def test_one_at_a_time_and_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    with folder(tmp_path / "a"), pytest.raises(ConfigError, match="another count is running"):
        folder(tmp_path / "a").__enter__()
    with folder(tmp_path / "a") as held:  # and it is free again
        (held.path / "settings.json").write_text("{")
        with pytest.raises(ConfigError, match=r"it.dir = .*settings.json cannot be read"):
            held.changed({})
        (held.path / "x.jsonl").write_text("{}\n{]\n")
        with pytest.raises(ValueError, match=r"x.jsonl:2: "):
            held.lines("x.jsonl").read()
        (held.path / "y.jsonl").mkdir()
        with pytest.raises(ConfigError, match=r"it.dir = .*: y.jsonl cannot be written"):
            held.lines("y.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"it.dir = .*/file: cannot be written"):
        folder(tmp_path / "file").__enter__()
