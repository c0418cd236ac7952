"""Short words for what tests do with environments."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from keel.agents.env_process.client import Deadlines, Hosted, Program
from keel.agents.types import ToolResult, Transcript
from keel.rl.turns import ToolCall
from keel.rl.types import Prompt
from tests.waiting import PATIENCE_S

HERE = Path(__file__).parent
TASK = Prompt(prompt_id="p7", domain="shop", messages=({"role": "user", "content": "Shop."},))
PATIENT = Deadlines(open_s=PATIENCE_S, reply_s=PATIENCE_S, verdict_s=PATIENCE_S, close_s=PATIENCE_S)


def program(target: str = "shop:Shop", **settings: Any) -> Program:
    return Program(**{"target": target, "folder": HERE, "deadlines": PATIENT, **settings})


@asynccontextmanager
async def episode(
    target: str = "shop:Shop", seed: int = 3, **settings: Any
) -> AsyncIterator[Hosted]:
    environment = Hosted(program(target, **settings))
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


def transcript(*messages: dict[str, Any], finish_reason: str = "stop") -> Transcript:
    return Transcript(messages=messages, finish_reason=finish_reason)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """On an event loop of its own. Nothing may be left of it: no process, file or thread."""
    before = held()
    result = result_of(work, within_s=2 * PATIENCE_S)
    until = time.monotonic() + PATIENCE_S
    while (left := more(held(), before)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left
    return result


def result_of(work: Coroutine[Any, Any, Any], *, within_s: float) -> Any:
    """Its result, on an event loop of its own. It is no result of the loop's task, since that one's
    repr is made when the loop takes back Ctrl-C, which is slow for the arrays of a trajectory."""
    results: list[Any] = []

    async def bounded() -> None:
        results.append(await asyncio.wait_for(work, within_s))

    asyncio.run(bounded())
    return results[0]


def more(now: Held, before: Held) -> dict[str, Any]:
    """What there was not before. What other tests left may go at any time."""
    children = sorted(set(now.children) - set(before.children))
    found = {"files": now.files - before.files, "threads": now.threads - before.threads}
    return {k: v for k, v in found.items() if v > 0} | ({"children": children} if children else {})


class Held(NamedTuple):
    files: int
    threads: int
    children: list[str]


def held() -> Held:
    """What this process has open, runs and has started."""
    children: list[str] = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):
            children += Path(f"/proc/self/task/{task}/children").read_text().split()
    return Held(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), children)


def alive(pid: int) -> bool:
    """Whether a process runs: one that is dead and not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
