"""Sandboxes for tests, which are skipped if none works here."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_process.client import ForkServerClient, ProcessEnvironment
from keel.agents.env_process.launch import EnvironmentProgram, EnvSandbox
from keel.rewards.sandbox.bubblewrap import IsolationError
from keel.rewards.sandbox.environments import EnvironmentSandbox, environment_sandbox
from tests.agents.episodes import HERE, alive, program

MINE = os.environ.get("MINE", str(os.getpid()))
"""Tag of this test's processes, which separates them from other tests' processes."""


def sleeping(seconds: int) -> list[int]:
    return commands(f"sleep\0{seconds}.{MINE}\0".encode())


def wrap_of(**settings: Any) -> EnvironmentSandbox:
    try:
        wrap = environment_sandbox("bubblewrap", **settings)
    except IsolationError as error:
        pytest.skip(str(error))
    assert isinstance(wrap, EnvironmentSandbox)
    return wrap


def attacker(
    wrap: EnvSandbox, parent: ForkServerClient | None = None, **settings: Any
) -> ProcessEnvironment:
    return ProcessEnvironment(attackers(wrap, **settings), fork_server=parent)


def attackers(wrap: EnvSandbox, **settings: Any) -> EnvironmentProgram:
    settings = {"folder": HERE, "memory_mib": None, "env": {"MINE": MINE}, **settings}
    return program("attacker:Attacker", sandbox=wrap, **settings)


@asynccontextmanager
async def parent_for(wrap: EnvSandbox, way: str) -> AsyncIterator[ForkServerClient | None]:
    """Yield a fork server for attackers if `way` is forked, else None."""
    parent = ForkServerClient(attackers(wrap)) if way == "forked" else None
    try:
        yield parent
        assert parent is None or not parent.disabled_reason, parent.disabled_reason
    finally:
        if parent is not None:
            await parent.close()


def commands(words: bytes) -> list[int]:
    pids: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if words in (folder / "cmdline").read_bytes() and alive(int(folder.name)):
                pids.append(int(folder.name))
        except OSError:
            continue
    return pids
