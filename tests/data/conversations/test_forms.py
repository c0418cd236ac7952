"""Formats of conversations."""

from __future__ import annotations

from typing import Any

import pytest

from keel.data.conversations.forms import conversation_of, thinking_of, tools_of
from keel.data.rows.read import BadLine

USER = {"role": "user", "content": "2+2?"}
SAID = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": 2}}}

THOUGHT = "<think>\ntwo and two\n</think>\n\n4"
PARTS = {"role": "user", "content": [{"type": "text", "text": "2+2?"}]}
SAME: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER, SAID]},
    "thinking in the content": {"messages": [PARTS, {"role": "assistant", "content": THOUGHT}]},
    "texts": {"prompt": "2+2?", "completion": THOUGHT},
    "messages of both sides": {"prompt": [USER], "completion": [SAID]},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": THOUGHT}]
    },
}


@pytest.mark.parametrize("form", SAME)
def test_equivalent_forms(form: str) -> None:
    messages, learned = conversation_of(SAME[form], "")
    assert (messages, learned) == ([USER, SAID], [1])
    told, learned = conversation_of({"system": "Add.", **SAME[form]}, "Not this.")
    assert (told[0], learned) == ({"role": "system", "content": "Add."}, [2])
    assert conversation_of(SAME[form], "Help.")[0][0]["content"] == "Help."
    assert thinking_of({}, messages, "as-written") and not thinking_of({}, messages, "without")
    assert not thinking_of({"thinking": False}, messages, "as-written")


def test_calls_and_results() -> None:
    tool = {"name": "add", "parameters": {"type": "object", "properties": {"x": {}}}}
    openai = {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "a", "function": {"name": "add", "arguments": '{"x": 2}'}},
                    {"function": {"name": "sub", "arguments": {}}},
                ],
            },
            {"role": "tool", "tool_call_id": "call_1_1", "content": "0"},
            {"role": "tool", "content": "4"},
            SAID,
        ],
        "tools": [tool],
    }
    messages, learned = conversation_of(openai, "")
    assert learned == [1, 4]
    assert messages[1]["tool_calls"][0] == CALL
    assert [(m["tool_call_id"], m["name"]) for m in messages[2:4]] == [
        ("call_1_1", "sub"),
        ("a", "add"),
    ]
    (shown,) = tools_of(openai)
    assert shown["type"] == "function" and shown["function"]["description"] == ""
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "2+2?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 2}}'},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "4"},
        ],
        "tools": '[{"name": "add"}]',
    }
    messages, learned = conversation_of(sharegpt, "")
    assert learned == [1, 3]
    assert messages[1]["tool_calls"][0]["function"] == CALL["function"]
    assert messages[2] == {
        "role": "tool",
        "content": "4",
        "tool_call_id": "call_1_0",
        "name": "add",
    }
    assert tools_of(sharegpt)[0]["function"]["name"] == "add"


def called(**call: Any) -> list[dict[str, Any]]:
    return [USER, {**SAID, "tool_calls": [{"function": call}]}]


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"prompt": "x", "reply": "y"}, "`completion`"),
        ({"messages": [{"role": "bot", "content": "x"}]}, r"`messages\[0\].role`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, SAID]}, "content`"),
        ({"messages": [USER]}, "assistant"),
        ({"messages": [USER, {**SAID, "loss": False}]}, "`weight`"),
        ({"messages": [SAID, USER]}, "assistant"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, r"`messages\[1\]`"),
        ({"messages": called(name="a", arguments="{")}, "function.arguments"),
        ({"messages": [USER, {"role": "tool", "content": "x"}, SAID]}, r"`messages\[1\]`"),
        ({"conversations": [{"from": "me", "value": "x"}]}, "from"),
    ],
)
def test_malformed_conversations(record: dict[str, Any], named: str) -> None:
    with pytest.raises(BadLine, match=named):
        conversation_of(record, "")
