"""An environment's tools as a program has them: by the protocol's own client, and by plain HTTP."""

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
from keel.agents.endpoint.server import Endpoint
from keel.agents.endpoint.tools import Tools
from keel.agents.types import ToolResult
from keel.rl.turns import ToolCall
from keel.rl.types import ENVIRONMENT, Verdict
from tests.agents.endpoint.kit import BUDGET, recording
from tests.agents.endpoint.kit import Policy as Said
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


def test_the_protocols_own_client_lists_and_calls_them() -> None:
    from mcp import Client  # noqa: PLC0415  (takes a second, which the other workers save)

    environment = Sums()

    async def work() -> list[Any]:
        async with Endpoint() as endpoint:
            tools = Tools(environment, [ADD], budget=BUDGET)
            address = endpoint.add(recording(Said(["a"])), tools)
            async with Client(address.tools_url) as client:
                (listed,) = (await client.list_tools()).tools
                found = [await client.call_tool("add", {"a": 40, "b": 2})]
                found.append(await client.call_tool("sub", {}))
            assert (listed.name, listed.input_schema["required"]) == ("add", ["a", "b"])
            await endpoint.finish("p/0")
            return found

    right, wrong = run(work())
    assert (right.content[0].text, right.is_error) == ("42", False)
    assert (wrong.content[0].text, wrong.is_error) == ("no tool sub", True)
    assert environment.log[0] == "call add {'a': 40, 'b': 2}"


def test_a_url_without_its_key_and_what_is_no_message_are_refused() -> None:
    async def work() -> list[tuple[int, Any]]:
        async with Endpoint() as endpoint, aiohttp.ClientSession() as session:
            address = endpoint.add(recording(Said(["a"])), Tools(Sums(), [ADD], budget=BUDGET))
            url = address.tools_url
            none = endpoint.add(recording(Said(["a"]), name="p/1")).base_url
            found: list[tuple[int, Any]] = []
            for at, body in (
                (url, '{"id": 1, "method": "ping"}'),
                (url, '{"method": "notifications/initialized"}'),
                (url, '{"id": 2, "method": "resources/list"}'),
                (url, '{"id": 3, "method": "tools/call", "params": {"name": 3}}'),
                (url, "[]"),
                (url, "not JSON"),
                (url + "x", "{}"),
                (none.removesuffix("v1") + "mcp/x", "{}"),
            ):
                async with session.post(at, data=body) as reply:
                    text = await reply.json() if reply.status != 202 else {}
                    found.append((reply.status, text.get("error", {}).get("code", "")))
            async with session.get(url) as reply:
                found.append((reply.status, ""))
            return found

    assert run(work()) == [
        *((200, ""), (202, ""), (200, -32601), (200, -32602), (400, None), (400, None)),
        *((401, "invalid_api_key"), (401, "invalid_api_key"), (405, "")),
    ]


def test_what_no_tokenizer_reads_reaches_no_environment() -> None:
    environment = Sums()
    tools = Tools(environment, [ADD], budget=BUDGET)
    params = {"name": "half \ud800", "arguments": {"a": "\ud800"}}
    asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    run(tools.answer(json.dumps(asked).encode()))
    assert environment.log == ["call half \ufffd {'a': '\ufffd'}"]
    for body in (b'{"id": NaN, "method": "ping"}', b"[" * 100_000, b"\xff"):
        with pytest.raises(ValueError):
            run(tools.answer(body))


def test_a_program_works_with_the_environments_tools() -> None:
    """99 ends the task: then there are no more turns, and what was done is graded."""
    made: list[Sums] = []

    def make() -> Sums:
        made.append(Sums(grade=Verdict(parts={"correct": 0.5})))
        return made[-1]

    code = {
        "calls": CALL + "ask(call('add', a=1, b=2)['result']['content'][0]['text']); ask()",
        "ends": CALL + "ask(); call('add', a=98, b=1); print(call('add', a=1, b=1)); ask()",
    }
    with running(says("a", "b"), code, make, judges=False) as runner:
        groups = [runner.submit(task(n, ENVIRONMENT), group_size=1, purpose="train") for n in code]
        calls, ends = (group.result(PATIENCE_S).trajectories[0] for group in groups)
    assert [m["content"] for m in calls.messages] == ["Sum.", "a", "3", "b"]
    assert [t.verdict for t in (calls, ends)] == [Verdict(parts={"correct": 0.5})] * 2
    assert (ends.finish_reason, ends.usage and ends.usage.turns) == ("stop", 1)
    assert "call add {'a': 98, 'b': 1}" in made[1].log and "call add {'a': 1, 'b': 1}" not in (
        made[1].log
    )
    assert all(environment.log[-1] == "close" for environment in made)


def test_an_environment_that_is_lost_in_a_call_drops_the_sample() -> None:
    code = {"p": CALL + "ask(); assert 'SIGSEGV' in call('add', a=1, b=2)['error']['message']"}
    with running(says("a"), code, lambda: Sums(fails="call")) as runner:
        group = runner.submit(replace(task("p", ENVIRONMENT)), group_size=1, purpose="train")
        assert group.result(PATIENCE_S).dropped == ("environment, at call: ended with SIGSEGV",)


class Slow(Sums):
    """Its calls take a while; one that is interrupted is its end, as of a process."""

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
)
def test_a_call_that_nobody_waits_for_goes_on_to_its_end(
    tmp_path: Path, then: str, reason: str
) -> None:
    """Of a client whose patience is short, a program that has ended, one that was ended."""
    begun = tmp_path / "begun"
    code = f"{CALL}ask()\ncall('add', {str(begun)!r}, a=1, b=2)\n{then}"

    def goes_on(seconds: float) -> None:
        begun.unlink(missing_ok=True)
        environment = Slow(begun.touch, grade=Verdict(parts={"correct": 0.5}))
        policy = says("a", "b", "c")
        given = {"seconds": seconds, "judges": False}
        with running(policy, {"p": code}, lambda: environment, **given) as runner:
            submitted = runner.submit(task("p", ENVIRONMENT), group_size=1, purpose="train")
            group = submitted.result(PATIENCE_S)
        assert not group.dropped
        assert (group.trajectories[0].finish_reason, environment.fails) == (reason, "")
        assert "call add {'a': 1, 'b': 2}" in environment.log and environment.log[-1] == "close"

    within_some(goes_on, (2.0, 20.0, 100.0) if reason == "deadline" else (PATIENCE_S,))


def test_a_task_that_such_a_call_ended_is_over() -> None:
    async def work() -> Any:
        begun = asyncio.Event()
        environment = Slow(begun.set)
        async with Endpoint() as endpoint, aiohttp.ClientSession() as session:
            recorded = recording(Said(["a"]))
            tools = Tools(environment, [ADD], budget=BUDGET)
            address = endpoint.add(recorded, tools)
            params = {"name": "add", "arguments": {"a": 98, "b": 1}}
            body = {"id": 1, "method": "tools/call", "params": params}
            calling = asyncio.create_task(session.post(address.tools_url, json=body).__aenter__())
            await asyncio.wait_for(begun.wait(), PATIENCE_S)
            calling.cancel()
            await tools.finish(PATIENCE_S)
            asked = {"messages": [{"role": "user", "content": "?"}]}
            bearer = {"Authorization": f"Bearer {address.api_key}"}
            url = f"{address.base_url}/chat/completions"
            async with session.post(url, json=asked, headers=bearer) as reply:
                return reply.status, (await reply.json())["error"]["code"]

    assert run(work()) == (403, "task_over")


def test_no_more_calls_are_run_than_may_be() -> None:
    environment = Sums()
    tools = Tools(environment, [ADD], budget=replace(BUDGET, calls=1))
    params = {"name": "add", "arguments": {"a": 1, "b": 2}}
    body = json.dumps({"id": 1, "method": "tools/call", "params": params}).encode()

    async def work() -> Any:
        return [await tools.answer(body) for _ in range(2)]

    first, second = (answer["result"] for answer in run(work()))
    assert (first["isError"], second["isError"]) == (False, True)
    assert second["content"][0]["text"].startswith("Nothing was run: 1 calls have been")
    assert len(environment.log) == 1


class Held(Sums):
    """A call waits for `go`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.go = asyncio.Event()

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        await asyncio.wait_for(self.go.wait(), PATIENCE_S)
        return await super().call(call, timeout_s=timeout_s)


@pytest.mark.parametrize("finished", [False, True])
def test_of_calls_at_once_none_runs_after_the_end(finished: bool) -> None:
    """99 ends the task; or the program is over while a call runs and others wait."""
    sums = [(1, 1), (98, 1), (2, 2), (3, 3)]

    async def work() -> tuple[list[Any], list[str]]:
        environment = Held()
        tools = Tools(environment, [ADD], budget=BUDGET)
        asked = [{"name": "add", "arguments": {"a": a, "b": b}} for a, b in sums]
        bodies = [{"id": 1, "method": "tools/call", "params": params} for params in asked]
        calls = [asyncio.create_task(tools.answer(json.dumps(b).encode())) for b in bodies]
        while len(tools._running) < len(calls):
            await asyncio.sleep(0)
        ending = asyncio.create_task(tools.finish(PATIENCE_S)) if finished else None
        await asyncio.sleep(0)
        environment.go.set()
        answers = [(await call) or {} for call in calls]
        if ending is not None:
            await ending
        return [answer.get("error", {}).get("message", "") for answer in answers], environment.log

    errors, log = run(work())
    ran = 1 if finished else 2
    assert errors == [""] * ran + ["the episode is over"] * (4 - ran)
    assert log == [f"call add {{'a': {a}, 'b': {b}}}" for a, b in sums[:ran]]


@pytest.mark.parametrize("waits", [True, False])
def test_a_request_whose_rest_does_not_come_is_nobodys_error(
    monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord], waits: bool
) -> None:
    """By a client that waits on, and by one that goes."""
    monkeypatch.setattr(server, "READ_S", 0.05 if waits else PATIENCE_S)

    async def work() -> list[bytes]:
        found: list[bytes] = []
        async with Endpoint() as endpoint:
            address = endpoint.add(recording(Said(["a"])), Tools(Sums(), [ADD], budget=BUDGET))
            for url in (f"{address.base_url}/chat/completions", address.tools_url):
                host, _, path = url.removeprefix("http://").partition("/")
                reader, writer = await asyncio.open_connection(*host.split(":"))
                head = f"POST /{path} HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n"
                writer.write(f"{head}Authorization: Bearer {address.api_key}\r\n\r\n{{".encode())
                if waits:
                    found.append((await reader.readline()).split()[1])
                writer.close()
        return found

    assert run(work()) == [b"408"] * 2 * waits
    assert not [record for record in logged if record.levelno >= logging.ERROR]
