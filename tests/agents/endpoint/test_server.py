"""The endpoint by HTTP: OpenAI's own client, streams, errors, clients that go away."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from keel.agents.endpoint.record import Finished
from keel.agents.endpoint.server import Address, Endpoint
from keel.agents.env_runtime.sockets import MOST_PATH
from tests.agents.endpoint.kit import (
    CHAT,
    TOOLS,
    Messages,
    Policy,
    check_law,
    recording,
    result,
    served,
    user,
)
from tests.agents.endpoint.test_record import script
from tests.agents.episodes import run
from tests.waiting import PATIENCE_S


async def agent(client: Any, turns: int, *, stream: bool) -> Messages:
    """A loop as programs have it: what came goes back as it is."""
    messages: Messages = [user("Where to?")]
    for _ in range(turns):
        said = await (streamed if stream else whole)(client, messages)
        messages.append(said)
        calls = said.get("tool_calls") or ()
        for call in calls:
            json.loads(call["function"]["arguments"])
            messages.append(result(call["id"], f"far {call['id']}"))
        if not calls:
            messages.append(user("Go on."))
    return messages


async def whole(client: Any, messages: Messages) -> dict[str, Any]:
    answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 7
    return choice.message.model_dump(exclude_none=True)


async def streamed(client: Any, messages: Messages) -> dict[str, Any]:
    """Put together by OpenAI's own code."""
    async with client.chat.completions.stream(
        model="m", messages=messages, tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        answer = await stream.get_final_completion()
    assert answer.usage.prompt_tokens > 0
    said = answer.choices[0].message.model_dump(exclude_none=True)
    for call in said.get("tool_calls") or ():
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    said.pop("parsed", None)
    return said


@pytest.mark.parametrize("thinking", [False, True])
def test_a_stream_gives_what_an_answer_does(thinking: bool) -> None:
    async def work(stream: bool) -> tuple[Policy, Messages, Finished]:
        policy = Policy(script)
        recorded = recording(policy, thinking=thinking)
        async with served(recorded) as (endpoint, _, client):
            messages = await agent(client, 6, stream=stream)
            return policy, messages, await endpoint.finish("p/0")

    plain, stream = run(work(False)), run(work(True))
    assert stream[0].turns == plain[0].turns
    assert [m.get("content") or "" for m in stream[1]] == [m.get("content") or "" for m in plain[1]]
    for policy, _, finished in (plain, stream):
        check_law(policy, finished)
        assert finished.counts.extended == (3 if thinking else 5)
        assert finished.usage.tools_s > 0


def test_two_programs_at_once_are_two_trajectories() -> None:
    policies = [Policy(script), Policy(["other"])]

    async def work() -> None:
        async with Endpoint() as endpoint:
            addresses = [
                endpoint.add(recording(policy, name=f"p/{i}")) for i, policy in enumerate(policies)
            ]
            with pytest.raises(ValueError, match="open already"):
                endpoint.add(recording(policies[0], name="p/0"))
            clients = [
                openai.AsyncOpenAI(base_url=a.base_url, api_key=a.api_key) for a in addresses
            ]
            await asyncio.gather(*(agent(client, 5, stream=False) for client in clients))
            with pytest.raises(openai.AuthenticationError, match="wrong API key"):
                await whole(clients[0].with_options(api_key=addresses[1].api_key), [user("a")])
            for i, policy in enumerate(policies):
                finished = await endpoint.finish(f"p/{i}")
                check_law(policy, finished)
                assert finished.usage.turns == 5 and len(finished.segments) == 1
            with pytest.raises(openai.NotFoundError, match="or it is over"):
                await whole(clients[0], [user("a")])
            with pytest.raises(KeyError):
                await endpoint.finish("p/0")
            for client in clients:
                await client.close()

    run(work())


def test_models_and_other_paths() -> None:
    async def work() -> None:
        async with served(recording(Policy(["a"]))) as (_, address, client):
            assert [model.id async for model in client.models.list()] == ["policy"]
            assert (await client.models.retrieve("any/name")).id == "any/name"
            with pytest.raises(openai.NotFoundError, match="chat completions"):
                await client.responses.create(model="m", input="a")
            connector = aiohttp.UnixConnector(path=str(address.socket))
            async with aiohttp.ClientSession(connector=connector) as session:
                head = {"Authorization": f"Bearer {address.api_key}"}
                async with session.get(f"{address.base_url}/models", headers=head) as answer:
                    assert answer.status == 200

    run(work())


DEEP = b'{"x": ' + b"[" * 700 + b"]" * 700 + b"}"
WRONG = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["a"]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, "messages[1]"),
    ({"messages": [result("call_9", "a")]}, "messages[0].tool_call_id"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {
            "messages": [
                user("a"),
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "function": {"name": "city", "arguments": "{"}}],
                },
            ]
        },
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        {
            "messages": [
                user("a"),
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "function": {"name": "city", "arguments": "{}"}}],
                },
                user("b"),
            ]
        },
        "messages[2]",
    ),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    *(
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": schema}}]},
            "tools",
        )
        for schema in ({"type": "object", "$schema": 1}, {"type": "object", "$schema": []})
    ),
    ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "city"}}}, "tool_choice"),
    ({"logit_bias": {"1": 5}}, "logit_bias"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"messages": [user("".join(map(chr, range(0x100000, 0x10FFFE))))]}, "messages"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "description": "b" * 300_000}}]},
        "tools",
    ),
    ({"n": 2}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": "9"}, "max_completion_tokens"),
    ({"logprobs": True}, "logprobs"),
    ({"functions": []}, "functions"),
    ({"stream": "yes"}, "stream"),
    ({"model": 3}, "model"),
]


async def post(
    address: Address, body: bytes, more: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    head = {"Authorization": f"Bearer {address.api_key}", **(more or {})}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{address.base_url}/chat/completions", data=body, headers=head) as answer,
    ):
        return answer.status, (await answer.json())


def test_a_wrong_request_is_refused_with_the_field() -> None:
    policy = Policy(["a"])

    async def work() -> None:
        async with served(recording(policy, window=1 << 20)) as (_, address, _):
            for change, field in WRONG:
                body = {"model": "m", "messages": [user("a")], **change}
                status, answer = await post(address, json.dumps(body).encode())
                assert (status, answer["error"]["param"]) == (400, field), answer
                assert field in answer["error"]["message"]
                assert answer["error"]["type"] == "invalid_request_error"
            for body in (b"{", b"[]", b"[" * 100_000, b'{"n": NaN}', b"\xff", DEEP):
                status, answer = await post(address, body)
                assert (status, answer["error"]["code"]) == (400, "invalid_json")

    run(work())
    assert not policy.requests


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_a_compressed_request_is_refused_unread(encoding: str) -> None:
    async def work() -> None:
        async with served(recording(Policy(["a"]))) as (_, address, _):
            for body in (b'{"messages": []}', gzip.compress(b" " * (1 << 20))):
                status, answer = await post(address, body, {"Content-Encoding": encoding})
                assert (status, answer["error"]["code"]) == (400, "unsupported_encoding")

    run(work())


def test_malformed_http_leaves_no_trace_in_the_log(logged: list[logging.LogRecord]) -> None:
    async def work() -> None:
        async with served(recording(Policy(["a"]))) as (_, address, _):
            host = address.base_url.removeprefix("http://").partition("/")[0]
            for raw in (b"GARBAGE\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: -3\r\n\r\n"):
                reader, writer = await asyncio.open_connection(*host.split(":"))
                writer.write(raw)
                assert b" 400 " in await asyncio.wait_for(reader.read(), PATIENCE_S)
                writer.close()

    run(work())
    assert not logged


def test_an_unexpected_error_is_one_of_the_endpoint(
    monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
) -> None:
    async def fails(*_: Any) -> None:
        raise OSError("no memory")

    async def work() -> Finished:
        recorded = recording(Policy(["a"]))
        monkeypatch.setattr(recorded, "turn", fails)
        async with served(recorded) as (endpoint, address, _):
            status, answer = await post(address, json.dumps({"messages": [user("a")]}).encode())
            assert (status, answer["error"]["type"]) == (500, "server_error")
            return await endpoint.finish("p/0")

    assert "no memory" in run(work()).failure


def test_requests_that_are_being_received_hold_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.agents.endpoint.server.MOST_BYTES", 1000)
    monkeypatch.setattr("keel.agents.endpoint.server.MOST_OF_ONE", 2000)
    monkeypatch.setattr("keel.agents.endpoint.server.MOST_OF_ALL", 2500)

    async def work() -> None:
        async with Endpoint() as endpoint:
            one, other = (endpoint.add(recording(Policy(["a"]), name=f"p/{i}")) for i in range(2))
            status, answer = await post(one, b" " * 1001)
            assert (status, answer["error"]["code"]) == (413, "too_large")
            assert await begun(one, 900) is None and await begun(one, 900) is None
            assert b" 429 " in (await begun(one, 900) or b""), "the trajectory's own limit"
            assert await begun(other, 500) is None
            assert b" 429 " in (await begun(other, 900) or b""), "the limit of all"
            while HELD:
                HELD.pop().close()

    run(work())


async def begun(address: Address, size: int) -> bytes | None:
    """Send all of a request but its last byte. Returns the answer that came at once, if any."""
    host, _, path = address.base_url.removeprefix("http://").partition("/")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {size + 1}\r\n"
    writer.write(f"{head}Authorization: Bearer {address.api_key}\r\n\r\n{' ' * size}".encode())
    HELD.append(writer)
    try:
        return await asyncio.wait_for(reader.read(100), 0.5)
    except TimeoutError:
        return None


HELD: list[asyncio.StreamWriter] = []


def test_a_key_of_any_bytes_is_a_wrong_one() -> None:
    async def work() -> None:
        async with served(recording(Policy(["a"]))) as (_, address, _):
            host, _, path = address.base_url.removeprefix("http://").partition("/")
            for key in (b"\xff", b"\xed\xa0\x80", "ключ".encode()):
                reader, writer = await asyncio.open_connection(*host.split(":"))
                writer.write(b"GET /%s/models HTTP/1.0\r\n" % path.encode())
                writer.write(b"Authorization: Bearer %s\r\n\r\n" % key)
                answer = await reader.read()
                writer.close()
                assert b" 401 " in answer and b"wrong API key" in answer

    run(work())


def test_settings_of_sampling_are_ignored_with_one_warning(
    logged: list[logging.LogRecord],
) -> None:
    policy = Policy(["a", "b"])
    body = {
        "messages": [user("half \ud800")],
        "temperature": 0,
        "seed": 1,
        "stop": [],
        "user": "me",
    }

    async def work() -> None:
        async with served(recording(policy)) as (_, address, _):
            for _ in range(2):
                status, _ = await post(address, json.dumps(body).encode())
                assert status == 200

    run(work())
    said = sorted(record.getMessage() for record in logged)
    named = [line.partition("request sets ")[2].partition(",")[0] for line in said]
    assert named == ["seed", "stop", "temperature"] and len(policy.turns) == 2
    assert "half �" in CHAT.decode(policy.turns[0][0])


def test_a_client_that_goes_away_cancels_its_turn() -> None:
    policy = Policy(["one", "two"])
    policy.hold = asyncio.Event()

    async def work() -> Finished:
        async with served(recording(policy)) as (endpoint, _, client):
            asking = asyncio.create_task(whole(client, [user("a")]))
            while not policy.requests:
                await asyncio.sleep(0.01)
            asking.cancel()
            async with asyncio.timeout(PATIENCE_S):
                while not (finished := endpoint_counts(endpoint)).given_up:
                    await asyncio.sleep(0.01)
            assert finished.requests == 1 and not policy.turns
            assert policy.hold is not None
            policy.hold.set()
            await whole(client, [user("a")])
            return await endpoint.finish("p/0")

    finished = run(work())
    check_law(policy, finished)
    assert len(finished.segments) == 1


def endpoint_counts(endpoint: Endpoint) -> Any:
    ((_, recorded, _),) = endpoint._open.values()
    return recorded.counts


def test_a_client_that_went_before_its_answer_gets_it_when_it_asks_again() -> None:
    """It goes while the last token is sampled: the turn is recorded, and nobody has it."""
    clients: list[socket.socket] = []

    class Unlucky(Policy):
        async def __call__(self, request: Any) -> Any:
            sampled = await super().__call__(request)
            if clients:
                clients.pop().close()
            return sampled

    policy = Unlucky(["one", "two"])

    async def work() -> Finished:
        async with served(recording(policy)) as (endpoint, address, client):
            port = int(address.base_url.split(":")[2].split("/")[0])
            clients.append(socket.create_connection(("127.0.0.1", port)))
            body = json.dumps({"model": "m", "messages": [user("a")]})
            path = address.base_url.split(str(port))[1]
            clients[0].sendall(
                f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\n"
                f"Authorization: Bearer {address.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
                f"{body}".encode()
            )
            async with asyncio.timeout(PATIENCE_S):
                while not policy.turns:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            answer = await client.with_options(max_retries=2).chat.completions.create(
                model="m", messages=[user("a")]
            )
            assert answer.choices[0].message.content == "one"
            return await endpoint.finish("p/0")

    finished = run(work())
    check_law(policy, finished)
    assert (finished.counts.repeated, finished.usage.turns) == (1, 1)


def test_clients_library_asks_again_for_a_turn_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.05)  # half a second
    policy = Policy(["one"])
    policy.fail = RuntimeError("engine 3 died")

    async def work() -> Finished:
        async with served(recording(policy)) as (endpoint, _, client):
            task = asyncio.create_task(whole(client.with_options(max_retries=2), [user("a")]))
            async with asyncio.timeout(PATIENCE_S):
                while not policy.requests:
                    await asyncio.sleep(0.01)
            policy.fail = None
            assert (await task)["content"] == "one"
            return await endpoint.finish("p/0")

    finished = run(work())
    check_law(policy, finished)
    assert (finished.counts.failed, len(finished.segments)) == (1, 1)
    assert policy.requests[0].seed == policy.requests[1].seed


def test_a_budget_that_is_spent_is_said_once() -> None:
    policy = Policy(["one"])

    async def work() -> Finished:
        async with served(recording(policy, turns=1)) as (endpoint, _, client):
            await whole(client, [user("a")])
            with pytest.raises(openai.PermissionDeniedError, match="1 turns is spent"):
                await whole(client.with_options(max_retries=5), [user("b")])
            return await endpoint.finish("p/0")

    finished = run(work())
    assert (finished.finish_reason, finished.counts.refused) == ("turns", 1)


@pytest.mark.parametrize("more", [0, 1])
def test_a_temporary_folder_whose_path_is_too_long_for_a_socket(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = len("/keel-endpoint-12345678/keel.sock")
    long = tmp_path / ("x" * (MOST_PATH + more - own - len(f"{tmp_path}/")))
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    async def work() -> None:
        async with Endpoint() as endpoint:
            address = endpoint.add(recording(Policy(["word"])))
            assert address.socket.parent.parent == (Path("/tmp") if more else long)
            _, writer = await asyncio.open_unix_connection(address.socket)
            writer.close()
            await writer.wait_closed()
        assert not address.socket.parent.exists() and not list(long.iterdir())

    run(work())
