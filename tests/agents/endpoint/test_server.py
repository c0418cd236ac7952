"""The endpoint over HTTP: official clients, streams, errors, disconnects, connection limits."""

import asyncio
import gzip
import json
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest

from keel.agents.endpoint import server
from keel.agents.endpoint.recorder import TrajectoryRecorder
from keel.agents.endpoint.server import Address, Endpoint
from tests.agents.endpoint.kit import (
    CHAT,
    TOOLS,
    Messages,
    Policy,
    check_law,
    client_of,
    recorder_of,
    result,
    script,
    served,
    user,
)
from tests.agents.episodes import asynchronous, run
from tests.waiting import PATIENCE_S


async def agent(client: Any, turns: int, *, stream: bool = False) -> Messages:
    messages: Messages = [user("Where to?")]
    for _ in range(turns):
        message = await (streamed if stream else whole)(client, messages)
        messages.append(message)
        calls = message.get("tool_calls") or ()
        messages += [result(call["id"], "far") for call in calls] or [user("Go on.")]
    return messages


async def whole(client: Any, messages: Messages) -> dict[str, Any]:
    answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return choice.message.model_dump(exclude_none=True)


async def content_of(client: Any, text: str = "?") -> str | None:
    reply = await client.chat.completions.create(model="m", messages=[user(text)])
    return reply.choices[0].message.content


async def streamed(client: Any, messages: Messages) -> dict[str, Any]:
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
    async def work(stream: bool) -> tuple[Policy, Messages, TrajectoryRecorder]:
        policy = Policy(script)
        async with served(recorder_of(policy, thinking=thinking)) as (endpoint, _, client):
            messages = await agent(client, 6, stream=stream)
            return policy, messages, await endpoint.finish("p/0")

    plain, stream = run(work(False)), run(work(True))
    assert stream[0].turns == plain[0].turns
    assert [m.get("content") or "" for m in stream[1]] == [m.get("content") or "" for m in plain[1]]
    for policy, _, finished in (plain, stream):
        check_law(policy, finished.segments)
        assert finished.usage.contexts_extended == (3 if thinking else 5)


@asynchronous
async def test_concurrent_programs_have_separate_trajectories() -> None:
    policies = [Policy(script), Policy(["other"])]
    async with Endpoint() as endpoint:
        addresses = [
            endpoint.add(recorder_of(policy, name=f"p/{i}")) for i, policy in enumerate(policies)
        ]
        async with client_of(addresses[0]) as one, client_of(addresses[1]) as other:
            await asyncio.gather(agent(one, 5), agent(other, 5))
            with pytest.raises(openai.AuthenticationError):
                await content_of(one.with_options(api_key=addresses[1].api_key))
            for i, policy in enumerate(policies):
                finished = await endpoint.finish(f"p/{i}")
                check_law(policy, finished.segments)
                assert finished.usage.turns == 5 and len(finished.segments) == 1
            with pytest.raises(openai.NotFoundError):
                await content_of(one)


def call_message(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "function": {"name": "city", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def messages(*entries: Any) -> dict[str, Any]:
    return {"messages": list(entries)}


def schema_of(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "b", "parameters": parameters}}]}


WRONG = [
    (messages(), "messages"),
    (messages({"role": "robot", "content": "a"}), "messages[0].role"),
    (messages(user("a"), {"role": "assistant", "content": "b"}), "messages[1]"),
    (messages(user("a"), call_message("{")), "messages[1].tool_calls[0].function.arguments"),
    (
        {"tools": [{"type": "function", "function": {"name": "b", "description": "b" * 300_000}}]},
        "tools",
    ),
    (schema_of({"type": "object", "$schema": []}), "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"logit_bias": {"1": 5}}, "logit_bias"),
    ({"n": 2}, "n"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"function_call": "auto"}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities[1]"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
]
WRONG_FOR_ANTHROPIC: list[dict[str, Any]] = [
    {"tool_choice": {"type": "any"}},
    {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
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


@asynchronous
async def test_invalid_request_names_its_field() -> None:
    policy = Policy(["a"])

    async with served(recorder_of(policy, window=1 << 20)) as (_, address, _):
        for change, name in WRONG:
            body = {"model": "m", "messages": [user("a")], **change}
            status, answer = await post(address, json.dumps(body).encode())
            assert (status, answer["error"]["param"]) == (400, name), answer
            assert answer["error"]["type"] == "invalid_request_error"
        for body in (b"{", b"[{}]", b"[" * 100_000, b'{"n": NaN}', b"\xff"):
            status, answer = await post(address, body)
            assert (status, answer["error"]["code"]) == (400, "invalid_json")
            assert ("must be a JSON object" in answer["error"]["message"]) == (body == b"[{}]")
        packed = gzip.compress(b" " * (1 << 20))
        status, answer = await post(address, packed, {"Content-Encoding": "gzip"})
        assert (status, answer["error"]["code"]) == (400, "unsupported_encoding")
        assert (await post(address, b" " * (server._MAX_REQUEST_BYTES + 1)))[0] == 413
        for change in WRONG_FOR_ANTHROPIC:
            body = {**BODY, "messages": [user("a")], **change}
            status, text = await post_anthropic(address, body)
            answer = json.loads(text)
            assert (status, answer["type"]) == (400, "error")
            assert answer["error"]["type"] == "invalid_request_error"
    assert not policy.requests


@asynchronous
async def test_connections_are_limited() -> None:
    policy = Policy(["yes"])
    async with Endpoint(max_connections=8) as endpoint:
        crowd, other = (endpoint.add(recorder_of(policy, name=name)) for name in ("crowd", "other"))
        url = urlsplit(crowd.base_url)

        async def connect(request: str) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writers.append(writer)
            writer.write(request.encode())
            return reader

        writers: list[asyncio.StreamWriter] = []
        idle = [await connect("") for _ in range(40)]
        async with client_of(other) as client:
            assert await content_of(client) == "yes"
        async with asyncio.timeout(PATIENCE_S):
            for reader in idle[:32]:
                with suppress(ConnectionError):
                    assert await reader.read() == b"", "it is closed"
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\n"
        head += f"Host: a\r\nAuthorization: Bearer {crowd.api_key}\r\nContent-Length: 9\r\n\r\n"
        for _ in range(12):
            await connect(head)  # without the body
        async with client_of(other) as client:
            assert await content_of(client) == "yes"
        assert "connections" in (await endpoint.finish("crowd")).last_refusal
        assert not (await endpoint.finish("other")).last_refusal
        for writer in writers:
            writer.close()


CITY = {
    "name": "city",
    "description": "Looks up a city.",
    "input_schema": TOOLS[0]["function"]["parameters"],
}
BODY = {
    **{"model": "m", "max_tokens": 200, "system": "Be brief.", "tools": [CITY]},
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
}


async def post_anthropic(address: Address, body: dict[str, Any]) -> tuple[int, str]:
    url = f"{address.env['ANTHROPIC_BASE_URL']}/v1/messages"
    head = {"x-api-key": address.env["ANTHROPIC_API_KEY"]}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, headers=head) as answer,
    ):
        return answer.status, await answer.text()


def assemble(text: str) -> dict[str, Any]:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    message = events[0]["message"]
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                block[block["type"]] += delta[block["type"]]
        elif event["type"] == "message_delta":
            message |= event["delta"]
    return message


@pytest.mark.parametrize(("stream", "thinking"), [(False, True), (True, False)])
@asynchronous
async def test_anthropic_tool_loop_extends_its_context(stream: bool, thinking: bool) -> None:
    policy = Policy(script)

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
            block = {"type": "tool_result", "content": "far", "is_error": True}
            results = [{**block, "tool_use_id": call["id"]} for call in calls]
            text_block = {"type": "text", "text": "Go on."}
            history.append({"role": "user", "content": results or [text_block]})
        finished = await endpoint.finish("p/0")
    check_law(policy, finished.segments)
    assert finished.usage.contexts_extended == (3 if thinking else 5)
    assert [one["function"]["name"] for one in finished.index.dialogues[0].tools] == ["city"]
    assert finished.index.opening[0] == {"role": "system", "content": "Be brief."}
    assert "Error: far" in CHAT.decode(policy.turns[-1][0])
