"""The file patterns of languages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from keel.agents.environments.code.languages import LANGUAGES, is_grading


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
