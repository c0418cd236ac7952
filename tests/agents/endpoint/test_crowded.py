"""A request that is nothing but marks: refused before it is read, since reading it would hold up
all other trajectories."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from keel.agents.endpoint import requests
from keel.agents.endpoint.errors import ApiError
from keel.agents.endpoint.requests import MOST_VALUES, Warnings, load, read_request
from tests.agents.endpoint.kit import user

FULL = MOST_VALUES + 1
CROWDED = {
    "messages": b'{"messages": [' + b"{}," * (FULL // 2) + b"{}]}",
    "a key that nobody reads": b'{"messages": [], "metadata": [' + b"[]," * (FULL // 2) + b"[]]}",
    "arguments": json.dumps({"messages": [user("a"), {"arguments": "[" + "0," * FULL}]}).encode(),
}


@pytest.mark.parametrize("body", CROWDED.values(), ids=CROWDED)
def test_what_no_context_holds_is_not_even_read(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "strict_json", None)
    with pytest.raises(ApiError, match="more than 1,048,576 values") as refused:
        read_request(body, Warnings())
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    with pytest.raises(ValueError, match="more than 1,048,576 values"):
        load(body)


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
def test_only_the_first_wrong_entry_is_reported(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        read_request(json.dumps(fields).encode(), Warnings())
    assert refused.value.status == 400
    assert isinstance(cause := refused.value.__cause__, ValidationError)
    assert cause.error_count() == 1


def test_a_long_text_is_read() -> None:
    text = "words, and more\n" * (MOST_VALUES // 4)
    body = json.dumps({"messages": [user(text)]}).encode()
    assert read_request(body, Warnings()).messages[0]["content"] == text
