"""An environment's tools for a program, over MCP and plain HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from keel.agents.endpoint import server
from keel.agents.endpoint.mcp_tools import McpTools
from keel.agents.endpoint.server import Endpoint
from keel.agents.types import ToolResult
from keel.rl.turns import ToolCall
from keel.rl.types import ENVIRONMENT, Verdict
from tests.agents.endpoint import kit
from tests.agents.endpoint.kit import BUDGET, recorder_of
from tests.agents.endpoint.test_driven import running, task
from tests.agents.episodes import run
from tests.agents.scripted import ADD, Sums, says
from tests.waiting import PATIENCE_S, within_some

pytestmark = pytest.mark.e2e

CALL = """
def call(name, until=None, **arguments):
    params = {"name": name, "arguments": arguments}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    return post(os.environ["KEEL_MCP_URL"], body, until)[1]
"""


def call_body(**arguments: Any) -> dict[str, Any]:
    params = {"name": "add", "arguments": arguments}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


def test_mcp_client_lists_and_calls_tools() -> None:
    from mcp import Client  # noqa: PLC0415  (takes a second)

    environment = Sums()

    async def work() -> list[Any]:
        async with Endpoint() as endpoint:
            tools = McpTools(environment, [ADD], budget=BUDGET)
            address = endpoint.add(recorder_of(kit.Policy(["a"])), tools)
            async with Client(address.tools_url) as client:
                (tool,) = (await client.list_tools()).tools
                results = [await client.call_tool("add", {"a": 40, "b": 2})]
                results.append(await client.call_tool("sub", {}))
            assert (tool.name, tool.input_schema["required"]) == ("add", ["a", "b"])
            await endpoint.finish("p/0")
            return results

    right, wrong = run(work())
    assert (right.content[0].text, right.is_error) == ("42", False)
    assert (wrong.content[0].text, wrong.is_error) == ("no tool sub", True)
    assert environment.log[0] == "call add {'a': 40, 'b': 2}"


def test_invalid_messages_and_keys_are_refused() -> None:
    async def work() -> list[tuple[int, Any]]:
        async with Endpoint() as endpoint, aiohttp.ClientSession() as session:
            tools = McpTools(Sums(), [ADD], budget=BUDGET)
            url = endpoint.add(recorder_of(kit.Policy(["a"])), tools).tools_url
            other = endpoint.add(recorder_of(kit.Policy(["a"]), name="p/1")).base_url
            outcomes: list[tuple[int, Any]] = []
            for at, body in (
                (url, '{"id": 1, "method": "ping"}'),
                (url, '{"method": "notifications/initialized"}'),
                (url, '{"id": 2, "method": "resources/list"}'),
                (url, '{"id": 3, "method": "tools/call", "params": {"name": 3}}'),
                (url, "[]"),
                (url, "not JSON"),
                (url + "x", "{}"),
                (other.removesuffix("v1") + "mcp/x", "{}"),
            ):
                async with session.post(at, data=body) as reply:
                    answer = await reply.json() if reply.status != 202 else {}
                    outcomes.append((reply.status, answer.get("error", {}).get("code", "")))
            async with session.get(url) as reply:
                outcomes.append((reply.status, ""))
            return outcomes

    assert run(work()) == [
        *((200, ""), (202, ""), (200, -32601), (200, -32602), (400, None), (400, None)),
        *((401, "invalid_api_key"), (401, "invalid_api_key"), (405, "")),
    ]


def test_surrogates_do_not_reach_the_environment() -> None:
    environment = Sums()
    tools = McpTools(environment, [ADD], budget=BUDGET)
    body = call_body(a="\ud800")
    body["params"]["name"] = "half \ud800"
    run(tools.answer(json.dumps(body).encode()))
    assert environment.log == ["call half \ufffd {'a': '\ufffd'}"]
    for invalid in (b'{"id": NaN, "method": "ping"}', b"[" * 100_000, b"\xff"):
        with pytest.raises(ValueError):
            run(tools.answer(invalid))


def test_program_uses_tools_until_one_ends_the_task() -> None:
    environments: list[Sums] = []

    def make() -> Sums:
        environments.append(Sums(grade=Verdict(parts={"correct": 0.5})))
        return environments[-1]

    programs = {
        "calls": CALL + "ask(call('add', a=1, b=2)['result']['content'][0]['text']); ask()",
        "ends": CALL + "ask(); call('add', a=98, b=1); print(call('add', a=1, b=1)); ask()",
    }
    with running(says("a", "b"), programs, make, judges=False) as runner:
        futures = [
            runner.submit(task(n, ENVIRONMENT), group_size=1, purpose="train") for n in programs
        ]
        calls, ends = (future.result(PATIENCE_S).trajectories[0] for future in futures)
    assert [m["content"] for m in calls.messages] == ["Sum.", "a", "3", "b"]
    assert [t.verdict for t in (calls, ends)] == [Verdict(parts={"correct": 0.5})] * 2
    assert (ends.finish_reason, ends.usage and ends.usage.turns) == ("stop", 1)
    logs = [line for environment in environments for line in environment.log]
    assert "call add {'a': 98, 'b': 1}" in logs and "call add {'a': 1, 'b': 1}" not in logs
    assert all(environment.log[-1] == "close" for environment in environments)


def test_environment_lost_in_a_call_drops_the_trajectory() -> None:
    programs = {"p": CALL + "ask(); assert 'SIGSEGV' in call('add', a=1, b=2)['error']['message']"}
    with running(says("a"), programs, lambda: Sums(fails="call")) as runner:
        future = runner.submit(task("p", ENVIRONMENT), group_size=1, purpose="train")
        assert future.result(PATIENCE_S).dropped == ("environment, at call: ended with SIGSEGV",)


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


@pytest.mark.parametrize(
    ("then", "reason"),
    [("ask()", "stop"), ("pass", "stop"), ("time.sleep(1000)", "deadline")],
    ids=["impatient", "ended", "killed"],
)
def test_abandoned_call_runs_to_its_end(tmp_path: Path, then: str, reason: str) -> None:
    begun = tmp_path / "begun"
    code = f"{CALL}ask()\ncall('add', {str(begun)!r}, a=1, b=2)\n{then}"

    def check(seconds: float) -> None:
        begun.unlink(missing_ok=True)
        environment = Slow(begun.touch, grade=Verdict(parts={"correct": 0.5}))
        settings = {"seconds": seconds, "judges": False}
        with running(says("a", "b", "c"), {"p": code}, lambda: environment, **settings) as runner:
            future = runner.submit(task("p", ENVIRONMENT), group_size=1, purpose="train")
            group = future.result(PATIENCE_S)
        assert not group.dropped
        assert (group.trajectories[0].finish_reason, environment.fails) == (reason, "")
        assert "call add {'a': 1, 'b': 2}" in environment.log and environment.log[-1] == "close"

    within_some(check, (2.0, 20.0, 100.0) if reason == "deadline" else (PATIENCE_S,))


def test_abandoned_call_can_end_the_task() -> None:
    async def work() -> Any:
        begun = asyncio.Event()
        async with Endpoint() as endpoint, aiohttp.ClientSession() as session:
            tools = McpTools(Slow(begun.set), [ADD], budget=BUDGET)
            address = endpoint.add(recorder_of(kit.Policy(["a"])), tools)
            body = call_body(a=98, b=1)
            calling = asyncio.create_task(session.post(address.tools_url, json=body).__aenter__())
            await asyncio.wait_for(begun.wait(), PATIENCE_S)
            calling.cancel()
            await tools.finish(PATIENCE_S)
            request = {"messages": [{"role": "user", "content": "?"}]}
            bearer = {"Authorization": f"Bearer {address.api_key}"}
            url = f"{address.base_url}/chat/completions"
            async with session.post(url, json=request, headers=bearer) as reply:
                return reply.status, (await reply.json())["error"]["code"]

    assert run(work()) == (403, "task_over")


def test_calls_beyond_the_budget_fail() -> None:
    environment = Sums()
    tools = McpTools(environment, [ADD], budget=replace(BUDGET, calls=1))
    body = json.dumps(call_body(a=1, b=2)).encode()

    async def work() -> Any:
        return [await tools.answer(body) for _ in range(2)]

    first, second = (answer["result"] for answer in run(work()))
    assert (first["isError"], second["isError"]) == (False, True)
    assert len(environment.log) == 1


class Held(Sums):
    """Its calls wait for `go`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.go = asyncio.Event()

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        await asyncio.wait_for(self.go.wait(), PATIENCE_S)
        return await super().call(call, timeout_s=timeout_s)


@pytest.mark.parametrize("finished", [False, True])
def test_no_waiting_call_runs_after_the_end(finished: bool) -> None:
    """The end is a call that ends the task, or `finish` while one runs and others wait."""
    sums = [(1, 1), (98, 1), (2, 2), (3, 3)]

    async def work() -> tuple[list[Any], list[str]]:
        environment = Held()
        tools = McpTools(environment, [ADD], budget=BUDGET)
        bodies = [json.dumps(call_body(a=a, b=b)).encode() for a, b in sums]
        calls = [asyncio.create_task(tools.answer(body)) for body in bodies]
        while len(tools._running) < len(calls):
            await asyncio.sleep(0)
        ending = asyncio.create_task(tools.finish(PATIENCE_S)) if finished else None
        await asyncio.sleep(0)
        environment.go.set()
        answers = [(await call) or {} for call in calls]
        if ending is not None:
            await ending
        return ["error" in answer for answer in answers], environment.log

    errors, log = run(work())
    ran = 1 if finished else 2
    assert errors == [False] * ran + [True] * (4 - ran)
    assert log == [f"call add {{'a': {a}, 'b': {b}}}" for a, b in sums[:ran]]


@pytest.mark.parametrize("waits", [True, False])
def test_incomplete_request_is_not_logged_as_error(
    monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord], waits: bool
) -> None:
    """The client either keeps the connection open or closes it."""
    monkeypatch.setattr(server, "_READ_S", 0.05 if waits else PATIENCE_S)

    async def work() -> list[bytes]:
        statuses: list[bytes] = []
        async with Endpoint() as endpoint:
            tools = McpTools(Sums(), [ADD], budget=BUDGET)
            address = endpoint.add(recorder_of(kit.Policy(["a"])), tools)
            for url in (f"{address.base_url}/chat/completions", address.tools_url):
                host, _, path = url.removeprefix("http://").partition("/")
                reader, writer = await asyncio.open_connection(*host.split(":"))
                head = f"POST /{path} HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n"
                writer.write(f"{head}Authorization: Bearer {address.api_key}\r\n\r\n{{".encode())
                if waits:
                    statuses.append((await reader.readline()).split()[1])
                writer.close()
        return statuses

    assert run(work()) == [b"408"] * 2 * waits
    assert not [record for record in logged if record.levelno >= logging.ERROR]
