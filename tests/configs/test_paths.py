"""Whether a run could write into its folder, before there is one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from keel.configs import paths
from keel.configs.paths import unwritable


def test_a_folder_that_can_be_made_is_not_made(tmp_path: Path) -> None:
    assert unwritable(tmp_path / "a" / "b") == ""
    assert unwritable(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for inside in ("file", "file/run", "file/a/run"):
        assert unwritable(tmp_path / inside) == f"{tmp_path / 'file'} is a file"
    said = f"{tmp_path / 'link'} is a link to {tmp_path / 'gone'}, which does not exist"
    assert unwritable(tmp_path / "link" / "run") == said
    assert unwritable(tmp_path / ("x" * 300)) == "File name too long"


def test_so_is_what_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so that the system is not asked."""
    closed = set[Path]()

    def access(path: Any, mode: int, **_: Any) -> bool:
        return not (mode & os.W_OK and Path(path) in closed)

    monkeypatch.setattr(paths.os, "access", access)
    closed.add(tmp_path)
    assert unwritable(tmp_path / "runs" / "mine") == f"no permission to write in {tmp_path}"
    closed.clear()
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    closed.add(run / "metrics.jsonl")
    assert unwritable(run) == f"no permission to write {run / 'metrics.jsonl'}"
