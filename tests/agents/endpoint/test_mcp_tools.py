"""An environment's tools for a program, over MCP and plain HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.agents.endpoint.mcp_tools import McpTools
from keel.agents.endpoint.server import Endpoint
from keel.agents.types import ToolResult
from keel.rl.turns import ToolCall
from keel.rl.types import ENVIRONMENT, Verdict
from tests.agents.endpoint.kit import BUDGET, recorder_of
from tests.agents.endpoint.test_driven import played, running
from tests.agents.episodes import asynchronous, run
from tests.agents.scripted import ADD, Policy, Sums
from tests.waiting import PATIENCE_S, within_some

pytestmark = pytest.mark.e2e

CALL = """
def call(name, until=None, **arguments):
    params = {"name": name, "arguments": arguments}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    return post(os.environ["KEEL_MCP_URL"], body, until)[1]
"""


@asynchronous
async def test_mcp_client_lists_and_calls_tools() -> None:
    from mcp import Client  # noqa: PLC0415  (takes a second)

    environment = Sums()

    async with Endpoint() as endpoint:
        tools = McpTools(environment, [ADD], budget=BUDGET)
        address = endpoint.add(recorder_of(Policy(["a"])), tools)
        async with Client(address.tools_url) as client:
            (tool,) = (await client.list_tools()).tools
            results = [await client.call_tool("add", {"a": 40, "b": 2})]
            results.append(await client.call_tool("sub", {}))
        assert (tool.name, tool.input_schema["required"]) == ("add", ["a", "b"])
        await endpoint.finish("p/0")
        (right, wrong) = results
    assert (right.content[0].text, right.is_error) == ("42", False)
    assert (wrong.content[0].text, wrong.is_error) == ("no tool sub", True)
    assert environment.log[0] == "call add {'a': 40, 'b': 2}"


def test_program_uses_tools_until_one_ends_the_task() -> None:
    environments: list[Sums] = []

    def make() -> Sums:
        environments.append(Sums(grade=Verdict(parts={"correct": 0.5})))
        return environments[-1]

    programs = {
        "calls": CALL + "ask(call('add', a=1, b=2)['result']['content'][0]['text']); ask()",
        "ends": CALL + "ask(); call('add', a=98, b=1); print(call('add', a=1, b=1)); ask()",
    }
    with running(Policy(["a", "b"]), programs, make, judges=False) as runner:
        calls, ends = (played(runner, name, ENVIRONMENT).trajectories[0] for name in programs)
    assert [m["content"] for m in calls.messages] == ["Sum.", "a", "3", "b"]
    assert [t.verdict for t in (calls, ends)] == [Verdict(parts={"correct": 0.5})] * 2
    assert (ends.finish_reason, ends.usage and ends.usage.turns) == ("stop", 1)
    logs = [line for environment in environments for line in environment.log]
    assert "call add {'a': 98, 'b': 1}" in logs and "call add {'a': 1, 'b': 1}" not in logs
    assert all(environment.log[-1] == "close" for environment in environments)


class Slow(Sums):
    """Its calls take a while, and an interrupted one loses it, as for a process."""

    def __init__(self, begun: Callable[[], object], **settings: Any) -> None:
        super().__init__(**settings)
        self._begun = begun

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        self._begun()
        try:
            await asyncio.sleep(0.5)
            return await Sums.call(self, call, timeout_s=timeout_s)
        except asyncio.CancelledError:
            self.fails = "verdict"
            raise


@pytest.mark.parametrize(("then", "reason"), [("ask()", "stop"), ("time.sleep(1000)", "deadline")])
def test_abandoned_call_runs_to_its_end(tmp_path: Path, then: str, reason: str) -> None:
    begun = tmp_path / "begun"
    code = f"{CALL}ask()\ncall('add', {str(begun)!r}, a=1, b=2)\n{then}"

    def check(seconds: float) -> None:
        begun.unlink(missing_ok=True)
        environment = Slow(begun.touch, grade=Verdict(parts={"correct": 0.5}))
        settings = {"seconds": seconds, "judges": False}
        with running(
            Policy(["a", "b", "c"]), {"p": code}, lambda: environment, **settings
        ) as runner:
            group = played(runner, "p", ENVIRONMENT)
        assert not group.dropped
        assert (group.trajectories[0].finish_reason, environment.fails) == (reason, "")
        assert "call add {'a': 1, 'b': 2}" in environment.log and environment.log[-1] == "close"

    within_some(check, (2.0, 20.0, 100.0) if reason == "deadline" else (PATIENCE_S,))


def test_calls_beyond_the_budget_fail() -> None:
    environment = Sums()
    tools = McpTools(environment, [ADD], budget=replace(BUDGET, calls=1))
    params = {"name": "add", "arguments": {"a": 1, "b": 2}}
    body = json.dumps({"id": 1, "method": "tools/call", "params": params}).encode()
    answers = [run(tools.answer(body)) for _ in range(2)]
    assert [answer["result"]["isError"] for answer in answers] == [False, True]
    assert len(environment.log) == 1
