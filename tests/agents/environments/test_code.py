"""Files as the policy of the code environment sees and edits them, and the patterns of tests."""

import stat
from pathlib import Path

import pytest

from keel.agents.environments.code.files import _run_file_tool


def test_edits_keep_modes_and_link_targets(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    path, link = tmp_path / "bin" / "run.sh", tmp_path / "run"
    path.write_text("one\r\n")
    path.chmod(0o751)
    link.symlink_to("bin/run.sh")
    _run_file_tool({"do": "edit", "path": str(link), "old": "one", "new": "zwölf"})
    assert path.read_bytes() == "zwölf\r\n".encode() and link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    new = tmp_path / "made" / "new.py"
    _run_file_tool({"do": "edit", "path": str(new), "old": "", "new": "a\n"})
    (tmp_path / "other").touch()
    assert new.read_text() == "a\n" and new.stat().st_mode == (tmp_path / "other").stat().st_mode
    with pytest.raises((ValueError, OSError)):
        _run_file_tool({"do": "edit", "path": str(tmp_path / "made"), "old": "", "new": "a"})
