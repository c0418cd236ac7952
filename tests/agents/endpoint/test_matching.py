"""What a client does to a message that it sends back, and what is a change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from keel.agents.endpoint.lookup import chain, key_of_tools
from keel.agents.endpoint.requests import Warnings, read_request
from tests.rollout.chat.families import CITY

ARGUMENTS = {"name": "Rome \u00e9", "days": 2}
CALL = {"id": "c", "type": "function", "function": {"name": "city", "arguments": "{}"}}


def keys(said: dict[str, Any], arguments: str) -> list[str]:
    call = {**CALL, "function": {"name": "city", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call], **said},
        {"role": "tool", "tool_call_id": "c", "content": "b"},
    ]
    body = json.dumps({"messages": messages}).encode()
    return chain(read_request(body, Warnings()).messages)


SAME = keys({"content": ""}, json.dumps(ARGUMENTS))


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ({}, json.dumps(ARGUMENTS)),
        ({"content": None, "refusal": None, "name": "agent"}, json.dumps(ARGUMENTS)),
        ({"content": [], "reasoning_content": "more"}, json.dumps(ARGUMENTS, indent=2)),
        ({"content": "\n \n"}, json.dumps(ARGUMENTS)),
        ({"content": [{"type": "text", "text": ""}]}, json.dumps(ARGUMENTS, ensure_ascii=False)),
        ({}, json.dumps(dict(reversed(ARGUMENTS.items())))),
        ({}, json.dumps({**ARGUMENTS, "days": 2.0})),
    ],
)
def test_what_is_no_change(said: dict[str, Any], arguments: str) -> None:
    assert keys(said, arguments) == SAME


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ({"content": "b"}, json.dumps(ARGUMENTS)),
        ({}, json.dumps({**ARGUMENTS, "days": True})),
        ({}, json.dumps({**ARGUMENTS, "days": "2"})),
        ({}, json.dumps({"name": "Rome"})),
    ],
)
def test_what_is_one(said: dict[str, Any], arguments: str) -> None:
    changed = keys(said, arguments)
    assert changed[:2] == SAME[:2] and changed[2] != SAME[2] and changed[3] != SAME[3]


def test_tools_are_compared_whole() -> None:
    key = key_of_tools([CITY])
    assert key_of_tools([]) != key != key_of_tools([CITY, CITY])
