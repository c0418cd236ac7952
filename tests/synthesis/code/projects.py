"""Tiny projects with a git history."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import ConfigError
from keel.configs.synthesis import CodeSourceConfig, CodeTasksConfig
from keel.examples.small.demonstrations import PYTHON, SETUP, TEST
from keel.synthesis.author import Author
from keel.synthesis.code.candidate import Candidate
from keel.synthesis.code.pipeline import CodePipeline
from keel.synthesis.code.sandboxes import CodeSandboxes
from tests.synthesis.authors import ScriptedAuthor, run_pipeline
from tests.waiting import PATIENCE_S

ISSUE = (
    "Totals of an empty list raise an error. (#7)\n\n"
    "`total([])` raises IndexError; it should be 0, as a sum of nothing is.\n\n"
    "Signed-off-by: A <a@example.org>\n"
)
BROKEN = "def total(numbers):\n    result = numbers[0]\n    for one in numbers[1:]:\n"
BROKEN += "        result += one\n    return result\n"
FIXED = "def total(numbers):\n    return sum(numbers)\n"
OLD_TEST = "from adding import total\n\n\ndef test_some():\n    assert total([1, 2]) == 3\n"
NEW_TEST = OLD_TEST + "\n\ndef test_the_hidden_one():\n    assert total([]) == 0\n"
BEFORE = {"adding.py": BROKEN, "tests/test_adding.py": OLD_TEST, "README.md": "Adds.\n"}
AFTER = {"adding.py": FIXED, "tests/test_adding.py": NEW_TEST}
Files = Mapping[str, str | bytes | None]


def repository(folder: Path, *changes: tuple[str, Files]) -> Path:
    """Create a git repository with these commits (message, files); None removes a file."""
    folder.mkdir(parents=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    user = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "core.hooksPath=/"]

    def git(*words: str) -> None:
        command = ["git", "-C", str(folder), *user, *words]
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=PATIENCE_S)

    git("init", "-q", "-b", "main")
    for message, files in changes:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                path.unlink()
            else:
                path.write_bytes(text if isinstance(text, bytes) else text.encode())
        git("add", "-A")
        git("commit", "-q", "--allow-empty", "-m", message)
    return folder


def source(folder: Path | None = None, **more: Any) -> CodeSourceConfig:
    # Our pytest plugins are slow.
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    scripts = {"setup": SETUP, "test": TEST}
    options = {"name": "adding", "env": env, "git": str(folder or "x"), **scripts, **more}
    return CodeSourceConfig(**options)


def candidate(before: Files = BEFORE, after: Files = AFTER, **more: Any) -> Candidate:
    """after: only the changed files."""

    def tree(files: Files) -> dict[str, tuple[str, bytes]]:
        return {
            path: ("f", text if isinstance(text, bytes) else text.encode())
            for path, text in files.items()
            if text is not None
        }

    fields = {"source": source(), "issue": ISSUE, "version": "1.0", "key": "adding-1", **more}
    return Candidate(base=tree(before), after=tree({**before, **after}), **fields)


def config(*sources: CodeSourceConfig, **more: Any) -> CodeTasksConfig:
    fields = {"python": PYTHON, "judge": False, "setup_turns": 0, "tests_s": PATIENCE_S, **more}
    return CodeTasksConfig(sources=sources, **fields)


def made(
    config: CodeTasksConfig, folder: Path, author: Author | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Run the pipeline; returns the report and the printed lines."""
    try:
        CodeSandboxes(config, folder)
    except ConfigError as error:
        pytest.skip(str(error))
    lines: list[str] = []
    pipeline = CodePipeline(config, author or ScriptedAuthor([]), folder)
    why, report = run_pipeline(pipeline, folder, lines.append)
    assert not why, lines
    return report, lines
