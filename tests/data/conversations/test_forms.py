"""Formats of conversations."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from keel.data.conversations.forms import conversation_of, thinking_of, tools_of, unread_of
from keel.data.rows.read import BadLine

USER = {"role": "user", "content": "2+2?"}
SAID = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": 2}}}

SAME: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER, SAID]},
    "reasoning by another name": {
        "messages": [USER, {"role": "assistant", "content": "4", "reasoning": "two and two"}]
    },
    "thinking in the content": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
            {"role": "assistant", "content": "<think>\ntwo and two\n</think>\n\n4"},
        ]
    },
    "texts": {"prompt": "2+2?", "completion": "<think>two and two</think>4"},
    "messages of both sides": {"prompt": [USER], "completion": [SAID]},
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": "2+2?"},
            {"from": "gpt", "value": "<think>two and two</think>4"},
        ]
    },
    "roles in `conversations`": {"conversations": [USER, SAID]},
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


def test_messages_not_to_learn() -> None:
    example = {"role": "assistant", "content": "3"}
    shown = {"prompt": [USER, example, USER], "completion": [SAID]}
    assert conversation_of(shown, "")[1] == [3]
    weighed = {"messages": [USER, {**example, "weight": 0}, USER, {**SAID, "weight": 1}]}
    assert conversation_of(weighed, "")[1] == [3]
    empty = {"messages": [USER, {"role": "assistant", "content": "", "weight": 0}, USER, SAID]}
    assert conversation_of(empty, "")[1] == [3]
    nothing = {"messages": [USER, {"role": "assistant", "content": ""}]}
    assert conversation_of(nothing, "", rendered=False)[1] == [1]


def test_named_results() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("add", "sub", "add")]
    results = [
        {"role": "tool", "content": "0", "name": "sub"},
        {"role": "tool", "content": "4"},
        {"role": "tool", "content": "5", "name": "add"},
    ]
    asked = {"role": "assistant", "tool_calls": calls}
    messages, _ = conversation_of({"messages": [USER, asked, *results, SAID]}, "")
    assert [(m["tool_call_id"], m["name"]) for m in messages[2:5]] == [
        ("call_1_1", "sub"),
        ("call_1_0", "add"),
        ("call_1_2", "add"),
    ]


@pytest.mark.parametrize(("spoken", "answered"), [(True, ["sub", "add"]), (False, ["add", "sub"])])
def test_abandoned_calls(spoken: bool, answered: list[str]) -> None:
    call, other = (
        {"from": "function_call", "value": json.dumps({"name": name, "arguments": {}})}
        for name in ("add", "sub")
    )
    again = [{"from": "human", "value": "No, the other way."}] * spoken
    result = {"from": "observation", "value": "4"}
    asked, said = {"from": "human", "value": "4?"}, {"from": "gpt", "value": "4."}
    record = {"conversations": [asked, call, *again, other, result, result, said]}
    messages, _ = conversation_of(record, "")
    assert [m["name"] for m in messages if m["role"] == "tool"] == answered


def test_unread_keys() -> None:
    record = {"messages": [{**USER, "time": 3}, SAID], "score": 1, "id": "a"}
    assert unread_of(record) == {"score", "messages[].time"}
    sides = {"prompt": [{**USER, "time": 3}], "completion": [{**SAID, "rank": 1, "mood": None}]}
    assert unread_of(sides) == {"prompt[].time", "completion[].rank"}
    sharegpt = [{"from": "human", "value": "?", "weight": 0, "lang": "en"}, {**SAID, "mark": 1}]
    assert unread_of({"conversations": sharegpt}) == {
        "conversations[].lang",
        "conversations[].mark",
    }


@pytest.mark.parametrize("key", ["loss", "train", "loss_mask"])
def test_other_names_for_weight(key: str) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"messages": [USER, {**SAID, key: False}]}, "messages[1]"),
        ({"prompt": "?", "completion": [{**SAID, key: 0}]}, "completion[0]"),
        ({"conversations": [{"from": "human", "value": "?", key: 1}]}, "conversations[0]"),
    ]
    for record, at in forms:
        with pytest.raises(BadLine, match=re.escape(f"`{at}.{key}`")):
            conversation_of(record, "")
    assert conversation_of({"messages": [USER, {**SAID, key: None}]}, "")[1] == [1]


def called(**call: Any) -> list[dict[str, Any]]:
    return [USER, {**SAID, "tool_calls": [{"function": call}]}]


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"mesages": []}, "mesages"),
        ({"messages": [USER], "prompt": "x"}, r"\{prompt: ''\}"),
        ({"prompt": "x", "reply": "y"}, "`completion`"),
        ({"prompt": "x", "completion": 3}, "`completion`"),
        ({"messages": "x"}, "`messages`"),
        ({"messages": []}, "`messages`"),
        ({"messages": ["x"]}, r"`messages\[0\]`"),
        ({"messages": [{"role": "bot", "content": "x"}]}, r"`messages\[0\].role`"),
        ({"messages": [{"role": "user", "content": 3}]}, r"`messages\[0\].content`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, SAID]},
            r"`messages\[0\].content`",
        ),
        ({"messages": [USER]}, "assistant"),
        ({"messages": [USER, {**SAID, "weight": 0}]}, "assistant"),
        ({"messages": [USER, {**SAID, "weight": 0.5}]}, "weight"),
        ({"messages": [SAID, USER]}, "assistant"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, r"`messages\[1\]`"),
        ({"messages": [USER, {**SAID, "reasoning_content": 1}]}, "reasoning"),
        ({"messages": [USER, {**SAID, "tool_calls": [3]}]}, r"tool_calls\[0\]"),
        ({"messages": called(name="")}, "function.name"),
        ({"messages": called(name="a", arguments="{")}, "function.arguments"),
        ({"messages": [USER, {"role": "tool", "content": "x"}, SAID]}, r"`messages\[1\]`"),
        (
            {"messages": [*called(name="a"), {"role": "tool", "content": "x", "name": "b"}]},
            r"`messages\[2\]`.*'b'",
        ),
        ({"conversations": [{"from": "me", "value": "x"}]}, "from"),
        ({"conversations": [{"from": "human", "text": "x"}]}, "value"),
        ({"messages": [USER, SAID], "system": 3}, "`system`"),
    ],
)
def test_malformed_conversations(record: dict[str, Any], named: str) -> None:
    with pytest.raises(BadLine, match=named):
        conversation_of(record, "")


@pytest.mark.parametrize("tools", [3, "x", [3], [{"type": "function"}]])
def test_malformed_tools(tools: object) -> None:
    with pytest.raises(BadLine, match="`tools"):
        tools_of({"tools": tools})
    with pytest.raises(BadLine, match="`thinking`"):
        thinking_of({"thinking": "yes"}, [], "as-written")
