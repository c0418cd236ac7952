"""MCP servers as environments, and their failures."""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_process.client import ProcessEnvironment
from keel.agents.env_process.launch import EnvironmentProgram
from keel.agents.mcp_client import McpEnvironment
from keel.agents.types import EnvironmentLost, Opening
from keel.rl.types import Prompt, Verdict
from tests.agents import openenv_stand_in
from tests.agents.episodes import HERE, PATIENT, TASK, asynchronous, run, use
from tests.waiting import LIMITS_S, PATIENCE_S, within_some

pytestmark = pytest.mark.e2e

SHOP = (sys.executable, str(HERE / "mcp_shop.py"), "{seed}")


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[tuple[McpEnvironment, Opening]]:
    environment = McpEnvironment(EnvironmentProgram(**{"command": SHOP, **PATIENT, **settings}))
    try:
        yield environment, await environment.open(TASK, seed=3)
    finally:
        await environment.close()


async def shop(environment: McpEnvironment, opening: Opening) -> None:
    assert opening.messages == TASK.messages
    assert [tool.name for tool in opening.tools] == ["buy", "go_wrong"]
    assert opening.tools[0].description == "Buy something."
    assert opening.tools[0].parameters["properties"]["count"]["type"] == "integer"
    assert (await use(environment, "buy", name="apple", count=2)).text == "1 left"
    result = await use(environment, "buy", name="pear")
    assert result.failed and "no pear here" in result.text
    result = await use(environment, "buy", count=1)
    assert result.failed and "'name'" in result.text
    assert (await use(environment, "sell")).failed
    # An error of the protocol, not of the tool, still comes from a living server.
    result = await use(environment, "go_wrong", how="refuse")
    assert result.failed and "not on Sundays" in result.text
    assert await environment.reply({"role": "assistant", "content": "bye"}) is None
    assert await environment.verdict((), "stop") == Verdict(parts={})


@asynchronous
async def test_stdio_server() -> None:

    async with served() as (environment, opening):
        await shop(environment, opening)
        # Lines outside the protocol are skipped: greetings are common.
        assert (await use(environment, "go_wrong", how="garbage")).text == "fine"
    with pytest.raises(EnvironmentLost):
        await use(environment, "buy", name="apple")


@pytest.mark.parametrize(
    ("how", "reason"), [("crash", "SIGSEGV"), ("hang", "within"), ("large", "8 MiB")]
)
def test_failing_server_loses_the_environment(how: str, reason: str) -> None:
    async def play(limit_s: float) -> None:
        async with served() as (environment, _):
            with pytest.raises(EnvironmentLost) as caught:
                await use(environment, "go_wrong", limit_s, how=how)
            assert reason in caught.value.detail
            assert "seed 3" in caught.value.output and "last words" in caught.value.output
            assert isinstance(await environment.verdict((), "stop"), str)

    limits_s = LIMITS_S if how == "hang" else (PATIENCE_S,)
    within_some(lambda limit_s: run(play(limit_s)), limits_s)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"command": (*SHOP[:2], "broken")}, "closed on Sundays"),
        ({"command": ("sleep", "1000"), "open_s": 0.5}, "sleep 1000: did not answer within 0.5 s"),
        ({"command": (), "url": "http://127.0.0.1:9/mcp"}, "127.0.0.1:9"),
    ],
)
@asynchronous
async def test_unreachable_server_is_reported(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(EnvironmentLost) as caught:
        async with served(**settings):
            pass
    assert caught.value.during == "open" and reason in str(caught.value)


@contextmanager
def over_http() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # clients wait until it is ready
        port = listener.getsockname()[1]
        server = subprocess.Popen(
            [sys.executable, str(HERE / "mcp_shop.py"), "http", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stderr=subprocess.DEVNULL,
        )
    try:
        yield f"http://127.0.0.1:{port}/mcp", server
    finally:
        server.kill()
        server.wait(timeout=PATIENCE_S)


def test_http_server_crashes_during_a_call() -> None:
    async def play(url: str) -> None:
        async with served(command=(), url=url) as (environment, opening):
            await shop(environment, opening)
            with pytest.raises(EnvironmentLost, match=r"0\.5 s"):
                await use(environment, "go_wrong", 0.5, how="hang")
        async with served(command=(), url=url) as (environment, _):
            with pytest.raises(EnvironmentLost, match=url) as caught:
                await use(environment, "go_wrong", how="crash")
            assert caught.value.during == "call"
            assert isinstance(await environment.verdict((), "stop"), str)

    with over_http() as (url, _):
        run(play(url))


OPENENV_TASK = Prompt(
    prompt_id="p",
    domain="shop",
    messages=({"role": "system", "content": "Be quick."}, {"role": "user", "content": "Shop."}),
    reward={"kind": "environment", "reset": {"split": "train", "index": 12}},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openenv")
    openenv_stand_in.install(folder)
    shutil.copy(HERE / "openenv_echo.py", folder / "echo.py")
    return folder


def hosted(folder: Path, target: str, **settings: Any) -> ProcessEnvironment:
    return ProcessEnvironment(
        EnvironmentProgram(target=target, folder=folder, **PATIENT, **settings)
    )


@asynchronous
async def test_openenv_class_is_recognized(folder: Path) -> None:
    environment = hosted(folder, "echo:Echo", arguments={"scale": [0, 2], "rules": "Speak."})
    opening = await environment.open(OPENENV_TASK, seed=3)
    system, first = opening.messages
    assert system["content"] == "Be quick."
    observation = {"said": "ready", "seed": 3, "where": "train 12"}
    assert first["content"] == f"Speak.\n\n{json.dumps(observation)}"
    (tool,) = opening.tools
    assert (tool.name, tool.description) == ("step", "Say something.")
    assert list(tool.parameters["properties"]) == ["message", "loud"]
    assert (await use(environment, "step", loud=True)).failed  # is not run
    assert (await use(environment, "step", message="a")).text == "a"
    failed = await use(environment, "step", message="raise")
    assert failed.failed and "no such word" in failed.text
    result = await use(environment, "step", message="bye", loud=True)
    assert result.done and result.text == "BYE"
    assert (await use(environment, "step", message="a")).failed
    verdict = await environment.verdict((), "stop")
    assert isinstance(verdict, Verdict)
    assert verdict.parts == {"correct": 0.0, "score": 0.75}
    assert verdict.facts == {"return": 1.5, "steps": 2, "state": {"step_count": 3}}
    await environment.close()
