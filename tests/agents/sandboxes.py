"""Sandboxes for tests: one that works here, or a skip that says why not."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from keel.agents.host.client import Deadlines, Hosted, Program, parent_of
from keel.agents.host.parent import Parent
from keel.agents.host.process import Wrap
from keel.rewards.sandbox.bubblewrap import IsolationError
from keel.rewards.sandbox.environments import EnvironmentSandbox, environment_wrap
from tests.agents.episodes import HERE, alive, program


def wrap_of(**settings: Any) -> EnvironmentSandbox:
    try:
        wrap = environment_wrap("bubblewrap", **settings)
    except IsolationError as error:
        pytest.skip(str(error))
    assert isinstance(wrap, EnvironmentSandbox)
    return wrap


def attacker(wrap: Wrap, parent: Parent | None = None, **settings: Any) -> Hosted:
    return Hosted(attackers(wrap, **settings), parent=parent)


def attackers(wrap: Wrap, **settings: Any) -> Program:
    settings = {"folder": HERE, "memory_mib": None, "env": {"MINE": "1"}, **settings}
    settings["deadlines"] = Deadlines(open_s=30, close_s=0.5)
    return program("attacker:Attacker", wrap=wrap, **settings)


@asynccontextmanager
async def parent_for(wrap: Wrap, way: str) -> AsyncIterator[Parent | None]:
    """What forks attackers where `way` is forked, else None."""
    parent = parent_of(attackers(wrap)) if way == "forked" else None
    try:
        yield parent
        assert parent is None or not parent.why_not, parent.why_not
    finally:
        if parent is not None:
            await parent.close()


def commands(words: bytes) -> list[int]:
    """Processes of this machine whose command line has `words`."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if words in (folder / "cmdline").read_bytes() and alive(int(folder.name)):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)
