"""Small code tasks in a generated repository. Each commit changes a number, and an issue asks for
the change.

The tasks pass all gates in `keel.synthesis.code.pipeline`.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from keel.configs.synthesis import CodeSourceConfig, CodeTasksConfig

_GIT_S = 60.0
PYTHON = str(Path(sys.executable).parent.resolve() / Path(sys.executable).name)
"""The path of the Python interpreter of this environment, with symbolic links resolved."""
SOURCE = "def pace():\n    return {pace}\n"
TESTS = """\
from pace import pace


def test_pace():
    assert pace() == {pace}


def test_a_number():
    assert type(pace()) is int
"""
# Use the installed interpreter with pytest; the language's own set-up needs the network.
SETUP = f"""
mkdir -p "$PREFIX/bin"
printf '#!/bin/sh\\nexec {PYTHON} "$@"\\n' > "$PREFIX/bin/python"
chmod +x "$PREFIX/bin/python"
"""
TEST = (
    'export PYTHONPATH=$REPO; "$PREFIX/bin/python" -P -m pytest -p no:cacheprovider '
    '-o addopts= -q --tb=no --continue-on-collection-errors --junitxml="$JUNIT/pytest.xml"'
)


def issue(pace: int) -> str:
    return f"pace() should be {pace}."


def draw_paces(draw: random.Random, count: int) -> list[int]:
    """Return random two-digit numbers. Each differs from the one before it."""
    paces = [draw.randrange(10, 100)]
    while len(paces) < count:
        if (pace := draw.randrange(10, 100)) != paces[-1]:
            paces.append(pace)
    return paces


def write(folder: Path, count: int, seed: int) -> None:
    """Write a git repository with `count` changes into a new folder. Raises OSError or
    CalledProcessError."""
    folder.mkdir(parents=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    user = ["-c", "user.name=keel", "-c", "user.email=keel@localhost", "-c", "core.hooksPath=/"]

    def git(*words: str) -> None:
        command = ["git", "-C", str(folder), *user, *words]
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=_GIT_S)

    git("init", "-q", "-b", "main")
    (folder / "tests").mkdir()
    for number, pace in enumerate(draw_paces(random.Random(f"pace {seed}"), count + 1)):
        (folder / "pace.py").write_text(SOURCE.format(pace=pace), encoding="utf-8")
        (folder / "tests/test_pace.py").write_text(TESTS.format(pace=pace), encoding="utf-8")
        git("add", "-A")
        git("commit", "-q", "-m", f"{issue(pace)} (#{number})" if number else "Begin")


def synthesis(repository: Path) -> CodeTasksConfig:
    """Return the settings for `keel synthesize` to make tasks from the repository."""
    # Skip installed plugins, which take time.
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    source = CodeSourceConfig(
        name="pace", git=str(repository), most=10_000, setup=SETUP, test=TEST, env=env
    )
    return CodeTasksConfig(
        sources=(source,),
        python=PYTHON,
        setup_turns=0,
        judge=False,
        least_issue=1,
        tests_s=60.0,
    )
