"""What a program needs beyond the system: its interpreter, wherever that lives."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_ASK = (
    "import json, sys;"
    "print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, sys.base_exec_prefix]))"
)
_ASKING_S = 30.0
_PARTS = ("bin", "lib", "lib64", "share", "ssl", "pyvenv.cfg")
"""Of an interpreter's folder: others' files may lie beside them."""
_MOST_LINKS = 40
_PYTHON = re.compile(r"python[0-9.]*t?")


@dataclass(frozen=True, slots=True)
class Runtime:
    executable: str
    """Absolute, and not resolved: a virtual environment is known by the name of the link."""
    paths: tuple[Path, ...]
    """What it reads, beyond /usr. A path that is a link, or under one, is there by each name."""


@lru_cache(maxsize=64)
def runtime(program: str) -> Runtime:
    """Of a Python, a script with a `#!` line, or any other executable.

    Raises FileNotFoundError where there is none.
    """
    found = shutil.which(program)
    if found is None:
        raise FileNotFoundError(f"there is no program {program}")
    path = Path(found).absolute()
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
    return Runtime(str(path), paths)


def _python(path: Path) -> Runtime:
    # Without `site`: nothing that somebody put into the environment runs outside the sandbox.
    command = [str(path), "-I", "-S", "-c", _ASK]
    kept = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    try:
        asked = subprocess.run(
            command, env=kept, capture_output=True, text=True, timeout=_ASKING_S, check=True
        )
        executable, *prefixes = json.loads(asked.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        raise FileNotFoundError(f"{path} is no Python interpreter: {error}") from error
    folders = [Path(prefix) for prefix in prefixes]
    above = Path(executable).parent.parent
    if (above / "pyvenv.cfg").is_file():  # before 3.14, `site` is what knows it
        folders.append(above)
    paths = [
        part
        for folder in dict.fromkeys(folders)
        for name in _PARTS
        if (folder / name).exists()
        for part in _names(folder / name)
    ]
    return Runtime(executable, tuple(dict.fromkeys([*paths, *_names(Path(executable))])))


def _names(path: Path) -> Iterator[Path]:
    """A path, what it links to step by step, and where it really is, all but those under /usr."""
    found, real = [path], path.resolve()
    while path.is_symlink() and len(found) < _MOST_LINKS:
        path = Path(os.path.normpath(path.parent / os.readlink(path)))
        found.append(path)
    for name in dict.fromkeys([*found, real]):
        if not name.is_relative_to("/usr"):
            yield name
