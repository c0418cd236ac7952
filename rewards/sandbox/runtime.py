"""Finds the files outside the system folders that a program needs, such as its interpreter."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_QUERY = (
    "import json, sys;"
    "print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, sys.base_exec_prefix]))"
)
_QUERY_TIMEOUT_S = 30.0
_PARTS = ("bin", "lib", "lib64", "share", "ssl", "pyvenv.cfg")
"""The parts of an interpreter's folder that are needed. It may contain unrelated files."""
_MAX_LINKS = 40
_PYTHON = re.compile(r"python[0-9.]*t?")


class _Runtime(NamedTuple):
    """An executable, and the paths that it reads."""

    executable: str
    """The absolute path. A virtual environment is recognized by the path of its link."""
    paths: tuple[Path, ...]
    """The files and folders outside /usr that it reads, under every name."""


@lru_cache(maxsize=64)
def runtime(program: str) -> _Runtime:
    """Find the files that a Python interpreter, a script with a `#!` line or another executable
    needs. Raises FileNotFoundError if the program does not exist."""
    executable = shutil.which(program)
    if executable is None:
        raise FileNotFoundError(f"there is no program {program}")
    path = Path(executable).absolute()
    if _PYTHON.fullmatch(path.name):
        return _python(path)
    with path.open("rb") as file:
        first = file.readline(512)
    paths = tuple(_names(path))
    if first.startswith(b"#!"):
        words = shlex.split(first[2:].decode(errors="replace"))
        if words and Path(words[0]).name == "env":
            words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        if words:
            paths += runtime(words[0]).paths
    return _Runtime(str(path), paths)


def _python(path: Path) -> _Runtime:
    # Without `site`: nothing from the environment runs outside the sandbox.
    command = [str(path), "-I", "-S", "-c", _QUERY]
    env = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        )
        executable, *prefixes = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        raise FileNotFoundError(f"{path} is no Python interpreter: {error}") from error
    folders = [Path(prefix) for prefix in prefixes]
    venv = Path(executable).parent.parent
    if (venv / "pyvenv.cfg").is_file():  # before 3.14, only `site` adds it to the prefixes
        folders.append(venv)
    paths = [
        part
        for folder in dict.fromkeys(folders)
        for name in _PARTS
        if (folder / name).exists()
        for part in _names(folder / name)
    ]
    return _Runtime(executable, tuple(dict.fromkeys([*paths, *_names(Path(executable))])))


def _names(path: Path) -> Iterator[Path]:
    """Yield a path, each symbolic link on the way to its target, and the target, outside /usr."""
    names, real = [path], path.resolve()
    while path.is_symlink() and len(names) < _MAX_LINKS:
        path = Path(os.path.normpath(path.parent / os.readlink(path)))
        names.append(path)
    for name in dict.fromkeys([*names, real]):
        if not name.is_relative_to("/usr"):
            yield name
