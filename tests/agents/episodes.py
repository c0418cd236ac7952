"""Helpers for tests of environments."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from keel.agents.env_process.client import ProcessEnvironment
from keel.agents.env_process.launch import EnvironmentProgram
from keel.agents.types import ToolResult
from keel.rl.turns import ToolCall
from keel.rl.types import Prompt
from tests.waiting import PATIENCE_S

HERE = Path(__file__).parent
TASK = Prompt(prompt_id="p7", domain="shop", messages=({"role": "user", "content": "Shop."},))
PATIENT = dict.fromkeys(("open_s", "reply_s", "verdict_s", "close_s"), PATIENCE_S)


def program(target: str = "shop:Shop", **settings: Any) -> EnvironmentProgram:
    return EnvironmentProgram(**{"target": target, "folder": HERE, **PATIENT, **settings})


@asynccontextmanager
async def episode(
    target: str = "shop:Shop", seed: int = 3, **settings: Any
) -> AsyncIterator[ProcessEnvironment]:
    environment = ProcessEnvironment(program(target, **settings))
    try:
        await environment.open(TASK, seed=seed)
        yield environment
    finally:
        await environment.close()


async def use(
    environment: Any, name: str, within_s: float = PATIENCE_S, /, **arguments: Any
) -> ToolResult:
    call = ToolCall(call_id="c1", name=name, arguments=arguments)
    return await environment.call(call, timeout_s=within_s)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    before = held()
    result = result_of(work, within_s=2 * PATIENCE_S)
    until = time.monotonic() + PATIENCE_S
    while (leaked := more(held(), before)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not leaked, leaked
    return result


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test as `run` does."""

    @functools.wraps(test)
    def sync(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return sync


def result_of(work: Coroutine[Any, Any, Any], *, within_s: float) -> Any:
    """Run a coroutine on a new event loop. The result bypasses the task, since asyncio makes the
    task's repr, which is slow for the arrays of a trajectory."""
    results: list[Any] = []

    async def bounded() -> None:
        results.append(await asyncio.wait_for(work, within_s))

    asyncio.run(bounded())
    return results[0]


def more(now: Held, before: Held) -> dict[str, Any]:
    """Return the growth since `before`; leftovers of other tests may disappear at any time."""
    children = sorted(set(now.children) - set(before.children))
    growth = {"files": now.files - before.files, "threads": now.threads - before.threads}
    return {k: v for k, v in growth.items() if v > 0} | ({"children": children} if children else {})


class Held(NamedTuple):
    files: int
    threads: int
    children: list[str]


def held() -> Held:
    children: list[str] = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):
            children += Path(f"/proc/self/task/{task}/children").read_text().split()
    # Python's only, because Ray of an earlier test may start others. The limiter's lasts.
    threads = sum(thread.name != "sandboxes" for thread in threading.enumerate())
    return Held(len(os.listdir("/proc/self/fd")), threads, children)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
