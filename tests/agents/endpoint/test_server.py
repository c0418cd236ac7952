"""The endpoint over HTTP: official clients, streams, errors, disconnects, connection limits."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import socket
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from pydantic import ValidationError

from keel.agents.endpoint import requests, server
from keel.agents.endpoint.anthropic import as_chat_request
from keel.agents.endpoint.recorder import Finished
from keel.agents.endpoint.requests import MAX_VALUES, ApiError, IgnoredFields, read_request
from keel.agents.endpoint.server import Address, Endpoint
from tests.agents.endpoint.kit import (
    CHAT,
    TOOLS,
    Messages,
    Policy,
    check_law,
    client_of,
    play,
    recorder_of,
    result,
    script,
    served,
    user,
)
from tests.agents.episodes import run
from tests.waiting import PATIENCE_S


async def agent(client: Any, turns: int, *, stream: bool) -> Messages:
    """Run a loop that sends back each message unchanged."""
    messages: Messages = [user("Where to?")]
    for _ in range(turns):
        message = await (streamed if stream else whole)(client, messages)
        messages.append(message)
        calls = message.get("tool_calls") or ()
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


async def content_of(client: Any, text: str = "?") -> str | None:
    reply = await client.chat.completions.create(model="m", messages=[user(text)])
    return reply.choices[0].message.content


async def streamed(client: Any, messages: Messages) -> dict[str, Any]:
    """Let OpenAI's client assemble a stream."""
    async with client.chat.completions.stream(
        model="m", messages=messages, tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        answer = await stream.get_final_completion()
    assert answer.usage.prompt_tokens > 0
    message = answer.choices[0].message.model_dump(exclude_none=True)
    for call in message.get("tool_calls") or ():
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    message.pop("parsed", None)
    return message


@pytest.mark.parametrize("thinking", [False, True])
def test_stream_equals_whole_answer(thinking: bool) -> None:
    async def work(stream: bool) -> tuple[Policy, Messages, Finished]:
        policy = Policy(script)
        async with served(recorder_of(policy, thinking=thinking)) as (endpoint, _, client):
            messages = await agent(client, 6, stream=stream)
            return policy, messages, await endpoint.finish("p/0")

    plain, stream = run(work(False)), run(work(True))
    assert stream[0].turns == plain[0].turns
    assert [m.get("content") or "" for m in stream[1]] == [m.get("content") or "" for m in plain[1]]
    for policy, _, finished in (plain, stream):
        check_law(policy, finished)
        assert finished.counts.extended == (3 if thinking else 5)
        assert finished.usage.tools_s > 0


def test_concurrent_programs_have_separate_trajectories() -> None:
    policies = [Policy(script), Policy(["other"])]

    async def work() -> None:
        async with Endpoint() as endpoint:
            addresses = [
                endpoint.add(recorder_of(policy, name=f"p/{i}"))
                for i, policy in enumerate(policies)
            ]
            with pytest.raises(ValueError, match="p/0"):
                endpoint.add(recorder_of(policies[0], name="p/0"))
            clients = [client_of(address) for address in addresses]
            await asyncio.gather(*(agent(client, 5, stream=False) for client in clients))
            with pytest.raises(openai.AuthenticationError):
                await whole(clients[0].with_options(api_key=addresses[1].api_key), [user("a")])
            for i, policy in enumerate(policies):
                finished = await endpoint.finish(f"p/{i}")
                check_law(policy, finished)
                assert finished.usage.turns == 5 and len(finished.segments) == 1
            with pytest.raises(openai.NotFoundError):
                await whole(clients[0], [user("a")])
            with pytest.raises(KeyError):
                await endpoint.finish("p/0")
            for client in clients:
                await client.close()

    run(work())


def test_models_socket_and_unknown_paths() -> None:
    async def work() -> None:
        async with served(recorder_of(Policy(["a"]))) as (_, address, client):
            assert [model.id async for model in client.models.list()] == ["policy"]
            assert (await client.models.retrieve("any/name")).id == "any/name"
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(model="m", input="a")
            connector = aiohttp.UnixConnector(path=str(address.socket))
            async with aiohttp.ClientSession(connector=connector) as session:
                head = {"Authorization": f"Bearer {address.api_key}"}
                async with session.get(f"{address.base_url}/models", headers=head) as answer:
                    assert answer.status == 200

    run(work())


def call_message(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "function": {"name": "city", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}]}


def messages(*entries: Any) -> dict[str, Any]:
    return {"messages": list(entries)}


WRONG = [
    ({"messages": None}, "messages"),
    (messages(), "messages"),
    (messages("a"), "messages[0]"),
    (messages({"role": "robot", "content": "a"}), "messages[0].role"),
    (messages(user("a"), {"role": "assistant", "content": "b"}), "messages[1]"),
    (messages(result("call_9", "a")), "messages[0].tool_call_id"),
    (
        messages({"role": "user", "content": [{"type": "image_url"}]}),
        "messages[0].content[0].type",
    ),
    (
        messages(user("a"), call_message("{")),
        "messages[1].tool_calls[0].function.arguments",
    ),
    (messages(user("a"), call_message("{}"), user("b")), "messages[2]"),
    (tool(name="a b"), "tools"),
    (tool(name="a", parameters={"type": "object", "$schema": 1}), "tools"),
    (tool(name="a", description="b" * 300_000), "tools"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "city"}}}, "tool_choice"),
    ({"logit_bias": {"1": 5}}, "logit_bias"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    (messages(user("".join(map(chr, range(0x100000, 0x10FFFE))))), "messages"),
    ({"n": 2}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": "9"}, "max_completion_tokens"),
    ({"logprobs": True}, "logprobs"),
    ({"functions": []}, "functions"),
    ({"stream": "yes"}, "stream"),
    ({"model": 3}, "model"),
]


async def post(
    address: Address, body: bytes, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    head = {"Authorization": f"Bearer {address.api_key}", **(headers or {})}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{address.base_url}/chat/completions", data=body, headers=head) as answer,
    ):
        return answer.status, (await answer.json())


def test_invalid_request_names_its_field() -> None:
    policy = Policy(["a"])
    deep = b'{"x": ' + b"[" * 700 + b"]" * 700 + b"}"

    async def work() -> None:
        async with served(recorder_of(policy, window=1 << 20)) as (_, address, _):
            for change, name in WRONG:
                body = {"model": "m", "messages": [user("a")], **change}
                status, answer = await post(address, json.dumps(body).encode())
                assert (status, answer["error"]["param"]) == (400, name), answer
                assert answer["error"]["type"] == "invalid_request_error"
            for body in (b"{", b"[]", b"[" * 100_000, b'{"n": NaN}', b"\xff", deep):
                status, answer = await post(address, body)
                assert (status, answer["error"]["code"]) == (400, "invalid_json")
            for encoding in ("gzip", "deflate", "br"):
                packed = gzip.compress(b" " * (1 << 20))
                status, answer = await post(address, packed, {"Content-Encoding": encoding})
                assert (status, answer["error"]["code"]) == (400, "unsupported_encoding")

    run(work())
    assert not policy.requests


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [' + b"{}," * (MAX_VALUES // 2) + b"{}]}",
        b'{"messages": [], "metadata": [' + b"[]," * (MAX_VALUES // 2) + b"[]]}",
        json.dumps({"messages": [user("a"), {"arguments": "[" + "0," * MAX_VALUES}]}).encode(),
    ],
    ids=["messages", "unused field", "arguments"],
)
def test_too_many_values_are_refused_unparsed(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "strict_json", None)
    for read in (partial(read_request, ignored=IgnoredFields()), as_chat_request):
        with pytest.raises(ApiError) as error:
            read(body)
        assert (error.value.code, error.value.limit) == ("context_length_exceeded", "window")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [0] * 1000},
        {"messages": [user("a")], "tools": [0] * 1000},
        {"messages": [{"role": "user", "content": [0] * 1000}]},
        {"messages": [{"role": "assistant", "tool_calls": [0] * 1000}]},
    ],
    ids=["messages", "tools", "content", "tool_calls"],
)
def test_validation_stops_at_the_first_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as error:
        read_request(json.dumps(fields).encode(), IgnoredFields())
    assert isinstance(cause := error.value.__cause__, ValidationError)
    assert cause.error_count() == 1


def test_long_text_with_many_commas_is_read() -> None:
    text = "words, and more\n" * (MAX_VALUES // 4)
    body = json.dumps({"messages": [user(text)]}).encode()
    assert read_request(body, IgnoredFields()).messages[0]["content"] == text


def host_and_path(address: Address) -> tuple[list[str], str]:
    host, _, path = address.base_url.removeprefix("http://").partition("/")
    return host.split(":"), path


def test_malformed_http_and_keys_are_not_logged(logged: list[logging.LogRecord]) -> None:
    async def work() -> None:
        async with served(recorder_of(Policy(["a"]))) as (_, address, _):
            host, path = host_and_path(address)
            get = b"GET /%s/models HTTP/1.0\r\nAuthorization: Bearer " % path.encode()
            for raw, status in (
                (b"GARBAGE\r\n\r\n", b" 400 "),
                (b"GET / HTTP/1.1\r\nContent-Length: -3\r\n\r\n", b" 400 "),
                *((get + key + b"\r\n\r\n", b" 401 ") for key in (b"\xff", b"\xed\xa0\x80")),
            ):
                reader, writer = await asyncio.open_connection(*host)
                writer.write(raw)
                assert status in await asyncio.wait_for(reader.read(), PATIENCE_S)
                writer.close()

    run(work())
    assert not logged


def test_unexpected_error_is_the_endpoints(
    monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
) -> None:
    async def fails(*_: Any) -> None:
        raise OSError("no memory")

    async def work() -> Finished:
        recorder = recorder_of(Policy(["a"]))
        monkeypatch.setattr(recorder, "turn", fails)
        async with served(recorder) as (endpoint, address, _):
            status, answer = await post(address, json.dumps({"messages": [user("a")]}).encode())
            assert (status, answer["error"]["type"]) == (500, "server_error")
            return await endpoint.finish("p/0")

    assert "no memory" in run(work()).failure


def test_unfinished_requests_have_a_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_REQUEST_BYTES", 1000)
    monkeypatch.setattr(server, "_MAX_TRAJECTORY_BYTES", 2000)
    monkeypatch.setattr(server, "_MAX_TOTAL_BYTES", 2500)
    writers: list[asyncio.StreamWriter] = []

    async def begin(address: Address, size: int) -> bytes:
        """Send all of a request but its last byte. Returns the immediate answer, if any."""
        host, path = host_and_path(address)
        reader, writer = await asyncio.open_connection(*host)
        head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {size + 1}"
        head += f"\r\nAuthorization: Bearer {address.api_key}\r\n\r\n"
        writer.write(f"{head}{' ' * size}".encode())
        writers.append(writer)
        try:
            return await asyncio.wait_for(reader.read(100), 0.5)
        except TimeoutError:
            return b""

    async def work() -> None:
        async with Endpoint() as endpoint:
            one, other = (endpoint.add(recorder_of(Policy(["a"]), name=f"p/{i}")) for i in range(2))
            status, answer = await post(one, b" " * 1001)
            assert (status, answer["error"]["code"]) == (413, "too_large")
            assert await begin(one, 900) == await begin(one, 900) == b""
            assert b" 429 " in await begin(one, 900), "the trajectory's limit"
            assert await begin(other, 500) == b""
            assert b" 429 " in await begin(other, 900), "the limit of all"
            for writer in writers:
                writer.close()

    run(work())


def test_ignored_settings_are_logged_once(logged: list[logging.LogRecord]) -> None:
    policy = Policy(["a", "b"])
    settings = {"temperature": 0, "seed": 1, "stop": [], "user": "me"}
    body = json.dumps({"messages": [user("half \ud800")], **settings}).encode()

    async def work() -> None:
        async with served(recorder_of(policy)) as (_, address, _):
            for _ in range(2):
                assert (await post(address, body))[0] == 200

    run(work())
    names = sorted(str(record.args[0]) for record in logged if isinstance(record.args, tuple))
    assert names == ["seed", "stop", "temperature"] and len(policy.turns) == 2
    assert "half �" in CHAT.decode(policy.turns[0][0])


def test_disconnect_cancels_the_turn() -> None:
    policy = Policy(["one", "two"])
    policy.hold = asyncio.Event()

    async def work() -> Finished:
        recorder = recorder_of(policy)
        async with served(recorder) as (endpoint, _, client):
            task = asyncio.create_task(whole(client, [user("a")]))
            while not policy.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            async with asyncio.timeout(PATIENCE_S):
                while not recorder.counts.cancelled:
                    await asyncio.sleep(0.01)
            assert recorder.counts.requests == 1 and not policy.turns
            assert policy.hold is not None
            policy.hold.set()
            await whole(client, [user("a")])
            return await endpoint.finish("p/0")

    finished = run(work())
    check_law(policy, finished)
    assert len(finished.segments) == 1


def test_disconnect_before_the_answer_resends_it() -> None:
    """The client disconnects while the last token is sampled: the turn is recorded and unsent."""
    clients: list[socket.socket] = []

    class Unlucky(Policy):
        async def __call__(self, request: Any) -> Any:
            sampled = await super().__call__(request)
            if clients:
                clients.pop().close()
            return sampled

    policy = Unlucky(["one", "two"])

    async def work() -> Finished:
        async with served(recorder_of(policy)) as (endpoint, address, client):
            (host, port), path = host_and_path(address)
            clients.append(socket.create_connection((host, int(port))))
            body = json.dumps({"model": "m", "messages": [user("a")]})
            clients[0].sendall(
                f"POST /{path}/chat/completions HTTP/1.1\r\nHost: x\r\n"
                f"Authorization: Bearer {address.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
                f"{body}".encode()
            )
            async with asyncio.timeout(PATIENCE_S):
                while not policy.turns:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert await content_of(client.with_options(max_retries=2), "a") == "one"
            return await endpoint.finish("p/0")

    finished = run(work())
    check_law(policy, finished)
    assert (finished.counts.repeated, finished.usage.turns) == (1, 1)


@pytest.mark.parametrize("error", [ConnectionResetError, TimeoutError])
def test_untaken_answer_is_kept_without_an_error(
    monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord], error: type[Exception]
) -> None:
    policy, send = Policy(["one"]), server._send

    async def fails(request: web.Request, *rest: Any) -> web.StreamResponse:
        await web.StreamResponse().prepare(request)  # part of it was written
        raise error

    async def work() -> str | None:
        async with served(recorder_of(policy)) as (_, _, client):
            monkeypatch.setattr(server, "_send", fails)
            create = partial(client.chat.completions.create, model="m", messages=[user("a")])
            with pytest.raises(openai.APIConnectionError):
                await create()
            monkeypatch.setattr(server, "_send", send)
            return (await create()).choices[0].message.content

    assert run(work()) == "one"
    assert len(policy.requests) == 1
    assert not [record for record in logged if record.levelno >= logging.ERROR]


def test_client_retries_a_failed_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.05)
    policy = Policy(["one"])
    policy.fail = RuntimeError("engine 3 died")

    async def work() -> Finished:
        async with served(recorder_of(policy)) as (endpoint, _, client):
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


def test_client_does_not_retry_a_spent_budget() -> None:
    async def work() -> Finished:
        async with served(recorder_of(Policy(["one"]), turns=1)) as (endpoint, _, client):
            await whole(client, [user("a")])
            with pytest.raises(openai.PermissionDeniedError):
                await whole(client.with_options(max_retries=5), [user("b")])
            return await endpoint.finish("p/0")

    finished = run(work())
    assert (finished.finish_reason, finished.counts.refused) == ("turns", 1)


@pytest.mark.parametrize("excess", [0, 1])
def test_socket_path_fits_a_long_tmpdir(
    excess: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suffix = len("/keel-endpoint-12345678/keel.sock")
    long = tmp_path / ("x" * (107 + excess - suffix - len(f"{tmp_path}/")))
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    async def work() -> None:
        async with Endpoint() as endpoint:
            address = endpoint.add(recorder_of(Policy(["word"])))
            assert address.socket.parent.parent == (Path("/tmp") if excess else long)
            _, writer = await asyncio.open_unix_connection(address.socket)
            writer.close()
            await writer.wait_closed()
        assert not address.socket.parent.exists() and not list(long.iterdir())

    run(work())


MOST, MANY = 8, 40


@pytest.mark.parametrize("place", ["port", "socket"])
def test_idle_connections_are_closed_first(place: str) -> None:
    async def work() -> None:
        async with Endpoint(most=MOST) as endpoint:
            address = endpoint.add(recorder_of(Policy(["yes"])))
            idle = [
                await (
                    asyncio.open_connection(*host_and_path(address)[0])
                    if place == "port"
                    else asyncio.open_unix_connection(str(address.socket))
                )
                for _ in range(MANY)
            ]
            async with client_of(address) as client:
                assert await content_of(client) == "yes"
            async with asyncio.timeout(PATIENCE_S):
                for reader, _ in idle[: MANY - MOST]:
                    with suppress(ConnectionError):
                        assert await reader.read() == b"", "it is closed"
            for _, writer in idle:
                writer.close()

    play(work())


def test_unread_connections_hold_no_descriptors() -> None:
    async def wait_for_files(limit: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(os.listdir("/proc/self/fd")) > limit:
                await asyncio.sleep(0.01)

    async def work() -> None:
        async with Endpoint(most=MOST) as endpoint:
            address = endpoint.add(recorder_of(Policy([])))
            place = address.base_url.removesuffix("/v1").rpartition("/")[2]
            request = f"GET /t/{place}/v1/models/{'x' * 7000} HTTP/1.1\r\nHost: a\r\n"
            request += f"Authorization: Bearer {address.api_key}\r\n\r\n"
            before = len(os.listdir("/proc/self/fd"))
            for data in (b"", request.encode() * 400):
                clients: list[socket.socket] = []
                for _ in range(MANY):
                    client = socket.socket(socket.AF_UNIX)
                    client.setblocking(False)
                    client.connect(str(address.socket))
                    clients.append(client)
                    with suppress(BlockingIOError):
                        client.send(data)
                    if data:
                        await asyncio.sleep(0.01)
                await wait_for_files(before + MANY + MOST)
                for client in clients:
                    client.close()
                await wait_for_files(before + MOST)

    play(work())


def test_largest_trajectory_loses_its_newest_connection() -> None:
    held, other = Policy(["late"]), Policy(["at once"])

    async def work() -> None:
        held.hold = asyncio.Event()
        async with Endpoint(most=MOST) as endpoint:
            busy = endpoint.add(recorder_of(held, name="busy"))
            few = endpoint.add(recorder_of(other, name="few"))
            async with client_of(busy) as client, client_of(few) as another:
                waiting = [asyncio.create_task(content_of(client)) for _ in range(MOST)]
                while len(held.requests) < MOST:
                    await asyncio.sleep(0.01)
                assert await content_of(another) == "at once"
                held.hold.set()
                outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert outcomes.count("late") == MOST - 1
            assert sum(isinstance(one, openai.APIConnectionError) for one in outcomes) == 1
            finished = await endpoint.finish("busy")
            assert finished.counts.cancelled == 1 and finished.failure
            assert not (await endpoint.finish("few")).failure
            check_law(held, finished)

    play(work())


CITY = {
    "name": "city",
    "description": "Looks up a city.",
    "input_schema": TOOLS[0]["function"]["parameters"],
}
BODY = {"model": "m", "max_tokens": 200, "system": "Be brief.", "tools": [CITY]}


async def post_anthropic(address: Address, body: dict[str, Any]) -> tuple[int, str]:
    url = f"{address.env['ANTHROPIC_BASE_URL']}/v1/messages"
    head = {"x-api-key": address.env["ANTHROPIC_API_KEY"]}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, headers=head) as answer,
    ):
        return answer.status, await answer.text()


def assemble(text: str) -> dict[str, Any]:
    """Assemble the message of a stream's events."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    message, partial_json = events[0]["message"], ""
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            partial_json = ""
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                partial_json += delta["partial_json"]
                block["input"] = json.loads(partial_json)
            else:
                block[block["type"]] += delta[block["type"]]
        elif event["type"] == "message_delta":
            message |= event["delta"]
    return message


@pytest.mark.parametrize(("stream", "thinking"), [(False, True), (True, False), (True, True)])
def test_anthropic_tool_loop_extends_its_context(stream: bool, thinking: bool) -> None:
    policy = Policy(script)

    async def work() -> Finished:
        async with served(recorder_of(policy, thinking=thinking)) as (endpoint, address, _):
            history: list[dict[str, Any]] = [user("Where to?")]
            for _ in range(6):
                request = {**BODY, "messages": history, "stream": stream}
                status, text = await post_anthropic(address, request)
                message = assemble(text) if stream else json.loads(text)
                assert status == 200 and message["usage"]["input_tokens"] > 0
                calls = [block for block in message["content"] if block["type"] == "tool_use"]
                assert message["stop_reason"] == ("tool_use" if calls else "end_turn")
                history.append({"role": "assistant", "content": message["content"]})
                results = [
                    {"type": "tool_result", "tool_use_id": call["id"], "content": "far"}
                    for call in calls
                ]
                text_block = {"type": "text", "text": "Go on."}
                history.append({"role": "user", "content": results or [text_block]})
            return await endpoint.finish("p/0")

    finished = run(work())
    check_law(policy, finished)
    assert finished.counts.extended == (3 if thinking else 5)
    assert [one["function"]["name"] for one in finished.dialogues[0].tools] == ["city"]
    assert finished.opening[0] == {"role": "system", "content": "Be brief."}


def test_anthropic_errors_have_its_format() -> None:
    changes: list[dict[str, Any]] = [
        {"tool_choice": {"type": "any"}},
        messages({"role": "robot", "content": "a"}),
        messages({"role": "user", "content": [{"type": "image"}]}),
        {"messages": "a"},
        {"tools": [{"name": 3}]},
        {"tools": [{"type": "bash_20250124", "name": "a"}]},
        {"output_format": {"type": "json_schema"}},
        {"tools": [{"name": "a b", "input_schema": {}}]},
    ]

    async def work() -> None:
        async with served(recorder_of(Policy(["a"]))) as (_, address, _):
            for change in changes:
                body = {**BODY, "messages": [user("a")], **change}
                status, text = await post_anthropic(address, body)
                answer = json.loads(text)
                assert (status, answer["type"]) == (400, "error")
                assert answer["error"]["type"] == "invalid_request_error"

    run(work())


def test_anthropic_settings_without_effect_are_logged(logged: list[logging.LogRecord]) -> None:
    settings = {"stop_sequences": ["a"], "thinking": {"type": "enabled"}, "top_k": 1}
    tools = [{"type": "custom", "strict": True, **CITY}]
    body = json.dumps({**BODY, **settings, "tools": tools, "messages": [user("a")]})
    assert read_request(as_chat_request(body.encode()), IgnoredFields()).tools
    names = {str(record.args[0]) for record in logged if isinstance(record.args, tuple)}
    assert names == {*settings, "tools[].function.strict"}
