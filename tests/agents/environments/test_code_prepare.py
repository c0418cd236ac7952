"""A repository's environment before a run, outside the sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.agents.environments.code.environment import prepare


def test_prepare_makes_the_folder_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An episode runs in another folder, where a relative path would be wrong."""
    (tmp_path / "tasks/environment/sealed").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    arguments, paths = prepare({"folder": "tasks/environment"}, [])
    assert arguments == {"folder": str(tmp_path / "tasks/environment")} and paths == []
    for wrong in ({"folder": "tasks"}, {}):
        with pytest.raises(ValueError, match="folder `environment`"):
            prepare(wrong, [])
