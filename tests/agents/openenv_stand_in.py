"""Stand-in for the parts of OpenEnv that an environment and the adapter use."""

import shutil
from pathlib import Path
from typing import Any

from pydantic import BaseModel

MODULES = ("env_server/interfaces.py", "env_server/mcp_types.py", "generic_client.py")


def install(folder: Path) -> None:
    core = folder / "openenv" / "core"
    (core / "env_server").mkdir(parents=True)
    shutil.copy(__file__, core / "stand_in.py")
    for name in MODULES:
        (core / name).write_text("from openenv.core.stand_in import *\n")


class Action(BaseModel):
    metadata: dict[str, Any] = {}


class Observation(BaseModel):
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = {}


class Environment: ...


class MCPEnvironment(Environment): ...
