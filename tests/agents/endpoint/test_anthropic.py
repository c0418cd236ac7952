"""Anthropic's Messages API: read, recorded and refused as chat completions are."""

from __future__ import annotations

import json
import logging
from typing import Any

import aiohttp
import pytest

from keel.agents.endpoint.anthropic import as_chat_request
from keel.agents.endpoint.errors import ApiError
from keel.agents.endpoint.record import Finished
from keel.agents.endpoint.requests import MOST_VALUES, Warnings, read_request
from keel.agents.endpoint.server import Address
from tests.agents.endpoint.kit import TOOLS, Policy, check_law, recording, served, user
from tests.agents.endpoint.test_record import script
from tests.agents.episodes import run

CITY = {
    "name": "city",
    "description": "Looks up a city.",
    "input_schema": TOOLS[0]["function"]["parameters"],
}
BODY = {"model": "m", "max_tokens": 200, "system": "Be brief.", "tools": [CITY]}


async def post(address: Address, body: dict[str, Any]) -> tuple[int, str]:
    url = f"{address.env['ANTHROPIC_BASE_URL']}/v1/messages"
    head = {"x-api-key": address.env["ANTHROPIC_API_KEY"]}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, headers=head) as answer,
    ):
        return answer.status, await answer.text()


def put_together(text: str) -> dict[str, Any]:
    """The message that the events of a stream spell."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    message, partial = events[0]["message"], ""
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            partial = ""
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                partial += delta["partial_json"]
                block["input"] = json.loads(partial)
            else:
                block[block["type"]] += delta[block["type"]]
        elif event["type"] == "message_delta":
            message |= event["delta"]
    return message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_loop_of_tools_extends_its_context(stream: bool, thinking: bool) -> None:
    policy = Policy(script)

    async def work() -> Finished:
        async with served(recording(policy, thinking=thinking)) as (endpoint, address, _):
            messages: list[dict[str, Any]] = [user("Where to?")]
            for _ in range(6):
                request = {**BODY, "messages": messages, "stream": stream}
                status, text = await post(address, request)
                message = put_together(text) if stream else json.loads(text)
                assert status == 200 and message["usage"]["input_tokens"] > 0
                calls = [block for block in message["content"] if block["type"] == "tool_use"]
                assert message["stop_reason"] == ("tool_use" if calls else "end_turn")
                messages.append({"role": "assistant", "content": message["content"]})
                results = [
                    {"type": "tool_result", "tool_use_id": call["id"], "content": "far"}
                    for call in calls
                ]
                messages.append(
                    {"role": "user", "content": results or [{"type": "text", "text": "Go on."}]}
                )
            return await endpoint.finish("p/0")

    finished = run(work())
    check_law(policy, finished)
    assert finished.counts.extended == (3 if thinking else 5)
    assert [tool["function"]["name"] for tool in finished.dialogues[0].tools] == ["city"]
    assert finished.opening[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
        ({"messages": [{"role": "robot", "content": "a"}]}, 400, "invalid_request_error"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
        ),
        ({"messages": "a"}, 400, "invalid_request_error"),
        ({"tools": [{"name": 3}]}, 400, "invalid_request_error"),
        ({"tools": [{"type": "bash_20250124", "name": "a"}]}, 400, "invalid_request_error"),
        ({"output_format": {"type": "json_schema"}}, 400, "invalid_request_error"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, 400, "invalid_request_error"),
    ],
)
def test_errors_have_anthropics_form(change: dict[str, Any], status: int, kind: str) -> None:
    async def work() -> tuple[int, str]:
        async with served(recording(Policy(["a"]))) as (_, address, _):
            return await post(address, {**BODY, "messages": [user("a")], **change})

    found, text = run(work())
    answer = json.loads(text)
    assert (found, answer["type"], answer["error"]["type"]) == (status, "error", kind)


def test_settings_without_effect_are_reported(logged: list[logging.LogRecord]) -> None:
    settings = {"stop_sequences": ["a"], "thinking": {"type": "enabled"}, "top_k": 1}
    tools = [{"type": "custom", "strict": True, **CITY}]
    body = json.dumps({**BODY, **settings, "tools": tools, "messages": [user("a")]})
    assert read_request(as_chat_request(body.encode()), Warnings()).tools
    named = {record.getMessage().partition("sets ")[2].partition(",")[0] for record in logged}
    assert named == {*settings, "tools[].function.strict"}


def test_a_request_beyond_every_context_says_so() -> None:
    with pytest.raises(ApiError) as refused:
        as_chat_request(b'{"messages": [' + b"0," * (MOST_VALUES + 1) + b"0]}")
    assert (refused.value.code, refused.value.limit) == ("context_length_exceeded", "window")
