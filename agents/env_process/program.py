"""The settings for running an environment: the program, its arguments and its time limits."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import keel
from keel.agents.env_process.process import EnvSandbox, encode_line

KEEL = Path(keel.__file__).resolve().parent  # not through a link: the sandbox has the folder
START = KEEL / "agents" / "env_runtime" / "start.py"
READABLE = tuple(dict.fromkeys((KEEL, START.resolve().parents[1])))
"""The parts of Keel that an environment needs to read. In a checkout, `keel/agents` is a link."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONNOUSERSITE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONUTF8": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Time limits in seconds for the methods of an environment. Tool calls have their own limit."""

    open_s: float = 60.0
    reply_s: float = 30.0
    verdict_s: float = 60.0
    close_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Settings for running an environment. They are the same for all episodes."""

    target: str
    """The class (`my_env:Shop`, `/path/to/file.py:Shop`), the module of functions (`my_tools`) or
    the address of an OpenEnv server (`http://…`)."""
    kind: Literal["auto", "class", "functions", "game", "openenv"] = "auto"
    """The kind of target. `auto` means `openenv` for an address or an OpenEnv class, `game` for a
    class with `reset` and `step`, `class` for any other class, and `functions` for everything else.
    """
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments for the class, and for the adapter of a game
    (`keel.agents.env_runtime.games`)."""
    python: str = sys.executable
    """Python interpreter (3.9 or later) for the environment. It does not need to have Keel
    installed."""
    folder: Path | None = None
    """Working directory, which is also the first folder that is searched for modules. None means
    the current directory."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    preload: bool = True
    """Import the module once and fork a process for each episode, if this is safe."""
    memory_mib: int | None = 4096
    readable: Sequence[Path] = ()
    """Paths that the environment may read in a sandbox, besides `folder` and its interpreter."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    wrap: EnvSandbox | None = None

    def __post_init__(self) -> None:
        if not self.target or self.target.startswith(":"):
            raise ValueError(f"environment: target = {self.target!r}; write module:name")
        if self.folder is not None and not self.folder.is_dir():
            raise ValueError(f"environment {self.target}: folder {self.folder} does not exist")
        try:
            encode_line(self.arguments)
        except ValueError as error:
            raise ValueError(f"environment {self.target}: arguments: {error}") from error

    @property
    def where(self) -> Path:
        return self.folder or Path.cwd()

    @property
    def needed(self) -> tuple[Path, ...]:
        file = self.where / self.target.partition(":")[0]
        files = [file] if file.name.endswith(".py") and file.is_file() else []
        return (*READABLE, self.where, *files, *self.readable)
