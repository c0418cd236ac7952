"""Files as the policy of the code environment sees and edits them, and the patterns of tests."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
from pathlib import Path

import pytest

from keel.agents.environments.code.files import execute, number_lines
from keel.agents.environments.code.languages import LANGUAGES, is_grading


def test_lines_match_those_of_compilers() -> None:
    assert number_lines("a\r\nb\r\n", 0, 0) == "     1\ta\n     2\tb"
    assert number_lines("a\f\x1cb\u2028c\x85", 0, 0) == "     1\ta\f\x1cb\u2028c\x85"
    assert number_lines("", 0, 0) == ""


def test_a_failed_edit_keeps_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("one\n" * 2 + "two\n")
    edit = {"do": "edit", "path": str(path), "old": "two", "new": "x" * 1000}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for request in (edit, {**edit, "path": str(tmp_path / "c.py"), "old": ""}):
            with pytest.raises(OSError, match="too large"):
                execute(request)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "one\none\ntwo\n"
    assert [one.name for one in tmp_path.iterdir()] == ["a.py"]


def test_edits_keep_modes_and_link_targets(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    path, link = tmp_path / "bin" / "run.sh", tmp_path / "run"
    path.write_text("one\r\n")
    path.chmod(0o751)
    link.symlink_to("bin/run.sh")
    execute({"do": "edit", "path": str(link), "old": "one", "new": "zwölf"})
    assert path.read_bytes() == "zwölf\r\n".encode() and link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    new = tmp_path / "made" / "new.py"
    execute({"do": "edit", "path": str(new), "old": "", "new": "a\n"})
    (tmp_path / "other").touch()
    assert new.read_text() == "a\n" and new.stat().st_mode == (tmp_path / "other").stat().st_mode
    with pytest.raises((ValueError, OSError)):
        execute({"do": "edit", "path": str(tmp_path / "made"), "old": "", "new": "a"})


@pytest.mark.e2e
def test_every_javascript_test_file_is_run(tmp_path: Path) -> None:
    """A file that counts as a test but is not run would be restored for nothing."""
    language, ends = LANGUAGES["javascript"], ("js", "mjs", "cjs")
    names = ("a.test", "a.spec", "a-test", "a_test", "test/a", "x/tests/b/a", "__tests__/a", "a")
    files = [f"{name}.{end}" for name in names for end in (*ends, "json", "md")]
    for file in [*files, "node_modules/x/a.test.js"]:
        (tmp_path / "repo" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "repo" / file).touch()
    node = tmp_path / "node"
    node.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/run\n")
    node.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JUNIT": "/x"}
    command = ["bash", "-c", language.test]
    subprocess.run(command, cwd=tmp_path / "repo", env=environment, check=True, timeout=60)
    run = {line[2:] for line in (tmp_path / "run").read_text().splitlines() if line[:2] == "./"}
    expected = {file for file in files if file.endswith(ends) and is_grading(language, file)}
    assert run == expected and len(run) == 3 * (len(names) - 1)
