"""An environment's tools as a program has them: by the protocol's own client, and by plain HTTP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiohttp
from mcp import Client

from keel.agents.endpoint.server import Endpoint
from keel.agents.endpoint.tools import Tools
from keel.rl.types import ENVIRONMENT, Verdict
from tests.agents.endpoint.kit import Policy as Said
from tests.agents.endpoint.kit import recording
from tests.agents.endpoint.test_driven import running, task
from tests.agents.episodes import run
from tests.agents.scripted import ADD, Sums, says

CALL = """
tools = os.environ["KEEL_MCP_URL"].removeprefix("http://").partition("/")
def call(name, **arguments):
    link = HTTPConnection(tools[0])
    params = {"name": name, "arguments": arguments}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    link.request("POST", "/" + tools[2], json.dumps(body))
    return json.loads(link.getresponse().read())
"""


def test_the_protocols_own_client_lists_and_calls_them() -> None:
    environment = Sums()

    async def work() -> list[Any]:
        async with Endpoint() as endpoint:
            tools = Tools(environment, [ADD], call_s=5.0)
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
            address = endpoint.add(recording(Said(["a"])), Tools(Sums(), [ADD], call_s=5.0))
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
        calls, ends = (group.result(30).trajectories[0] for group in groups)
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
        assert group.result(30).dropped == ("environment, at call: ended with SIGSEGV",)
