"""Sandboxes for tests, which are skipped if none works here."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_process.client import ForkServerClient, ProcessEnvironment
from keel.agents.env_process.launch import EnvSandbox
from keel.rewards.sandbox.bubblewrap import IsolationError
from keel.rewards.sandbox.environments import EnvironmentSandbox, environment_sandbox
from tests.agents.episodes import TASK, alive, program

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


@asynccontextmanager
async def attackers_in(wrap: EnvSandbox, way: str) -> AsyncIterator[Any]:
    """Yield a function that opens an attacker, which is started or forked."""
    spec = program("attacker:Attacker", sandbox=wrap, memory_mib=None, env={"MINE": MINE})
    parent = ForkServerClient(spec)

    async def attacker() -> ProcessEnvironment:
        server = parent if way == "forked" else None
        environment = ProcessEnvironment(spec, fork_server=server)
        await environment.open(TASK, seed=3)
        return environment

    try:
        yield attacker
        assert not parent.disabled_reason, parent.disabled_reason
    finally:
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
