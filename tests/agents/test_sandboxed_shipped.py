"""Shipped environments in the sandbox: trip planner, kernel, game, MCP server."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import keel
from keel.agents.env_process.client import Hosted, Program
from keel.agents.env_process.process import descendants
from keel.agents.environments.trip.environment import make_task
from keel.agents.environments.trip.prompts import trip_prompts
from keel.agents.environments.trip.solver import solve
from keel.agents.environments.trip.tasks import LEVELS
from keel.agents.mcp_client import McpEpisode, McpServer
from keel.rl.types import Verdict
from tests.agents.episodes import HERE, TASK, alive, program, run, transcript, use
from tests.agents.sandboxes import wrap_of
from tests.agents.test_interpreter import needs_jupyter
from tests.waiting import wait_for, within_some

KEEL = Path(keel.__file__).parent
SHIPPED = "keel.agents.environments"
pytestmark = pytest.mark.e2e


def test_shipped_environments_run_concurrently() -> None:
    wrap = wrap_of()

    async def trip() -> None:
        (prompt,) = trip_prompts(5, 1, seed=3)
        target = f"{SHIPPED}.trip.environment:Trip"
        environment = Hosted(Program(target=target, folder=KEEL, wrap=wrap))
        assert (await environment.open(prompt, seed=0)).messages == prompt.messages
        calls = solve(make_task(prompt.reward["trip"]["seed"], LEVELS[5])[1])
        name, arguments = next(calls)
        with suppress(StopIteration):
            while True:
                name, arguments = calls.send((await use(environment, name, **arguments)).text)
        verdict = await environment.verdict(transcript())
        assert isinstance(verdict, Verdict) and verdict.parts["correct"] == 1.0
        await environment.close()

    async def calculator() -> None:
        target = f"{SHIPPED}.calculator:Calculator"
        environment = Hosted(Program(target=target, folder=KEEL, wrap=wrap))
        await environment.open(TASK, seed=0)
        assert (await use(environment, "calculate", expression="6 * 7")).text == "42"
        await environment.close()

    async def game() -> None:
        environment = Hosted(program("shop:Guess", wrap=wrap))
        opening = await environment.open(TASK, seed=3)
        (move,) = (tool.name for tool in opening.tools)
        (name,) = opening.tools[0].parameters["properties"]
        results = [await use(environment, move, **{name: guess}) for guess in (2, 2, 2)]
        assert results[-1].done and isinstance(await environment.verdict(transcript()), Verdict)
        await environment.close()

    async def server() -> None:
        command = (sys.executable, "mcp_shop.py", "{seed}")
        environment = McpEpisode(McpServer(command=command, folder=HERE, wrap=wrap))
        opening = await environment.open(TASK, seed=3)
        assert opening.tools
        await environment.close()

    async def play() -> None:
        await asyncio.gather(trip(), calculator(), game(), server())

    run(play())


@needs_jupyter
def test_kernel_without_mounts() -> None:
    wrap = wrap_of()

    async def play() -> None:
        target = f"{SHIPPED}.interpreter:Interpreter"
        environment = Hosted(
            Program(target=target, folder=KEEL, wrap=dataclasses.replace(wrap, mounts=False))
        )
        await environment.open(TASK, seed=3)
        code = "import os; os.path.exists('/proc/self'), os.path.exists('/dev/ptmx')"
        assert (await use(environment, "python", code=code)).text == "(False, False)"
        await environment.close()

    run(play())


@needs_jupyter
def test_kernel_in_the_sandbox() -> None:
    async def play(cell_s: float) -> None:
        target = f"{SHIPPED}.interpreter:Interpreter"
        arguments = {"cell_s": cell_s, "ending_s": cell_s}
        environment = Hosted(
            Program(target=target, folder=KEEL, wrap=wrap_of(), arguments=arguments)
        )
        await environment.open(TASK, seed=3)

        async def cell(code: str) -> str:
            result = await use(environment, "python", code=code)
            assert not result.failed
            return result.text

        assert await cell("x = 6\nprint('a')\nx * 7") == "a\n42"
        text = await cell("print('begun', flush=True)\nimport time; time.sleep(1000)")
        assert text.startswith("begun") and "KeyboardInterrupt" in text
        assert await cell("x") == "6"
        assert "not supported" in await cell("import socket; socket.socket()")
        assert "PermissionError" in await cell(
            "import os; open(f'/proc/{os.getppid()}/mem', 'r+b')"
        )
        assert await cell("import os; os.system('echo from a child');") == "from a child"
        assert await cell("!echo from a terminal") == "from a terminal"
        assert "all variables are gone" in await cell("os._exit(3)")
        deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(1000)"
        assert "could not be interrupted" in await cell(deaf)
        assert await cell("1 + 1") == "2"
        assert environment._process is not None
        inside = descendants(environment._process.pid)
        assert len(inside) >= 3  # the kernel, its environment, and the sandbox
        await environment.close()
        wait_for(lambda: not any(map(alive, inside)))

    within_some(lambda cell_s: run(play(cell_s)), (2.0, 10.0, 60.0))
