"""Stand-in for the parts of OpenEnv that an environment and the adapter use."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
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


class ListToolsAction(Action):
    type: str


class CallToolAction(Action):
    type: str
    tool_name: str
    arguments: dict[str, Any]


class GenericEnvClient:
    """A client without a connection."""

    def __init__(self, base_url: str, message_timeout_s: float, headers: Any) -> None:
        assert base_url.startswith("ws://")

    def sync(self) -> GenericEnvClient:
        return self

    def reset(self, seed: int, split: str, index: int) -> SimpleNamespace:
        return SimpleNamespace(observation={"said": f"{split} {index}"}, reward=None, done=False)

    def step(self, action: dict[str, Any]) -> SimpleNamespace:
        if action["message"] == "raise":
            raise RuntimeError("Server error: no such word (code: EXECUTION_ERROR)")
        if action["message"] == "gone":
            raise ConnectionError("gone")
        return SimpleNamespace(observation={"said": action["message"]}, reward=0.5, done=False)

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...
