"""Formats of conversations."""

from typing import Any

import pytest

from keel.data.conversations.forms import _is_thinking, _parse_conversation, _parse_tools
from keel.data.rows import BadLine

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
    messages, learned = _parse_conversation(SAME[form], "")
    assert (messages, learned) == ([USER, SAID], [1])
    told, learned = _parse_conversation({"system": "Add.", **SAME[form]}, "Not this.")
    assert (told[0], learned) == ({"role": "system", "content": "Add."}, [2])
    assert _parse_conversation(SAME[form], "Help.")[0][0]["content"] == "Help."
    assert _is_thinking({}, messages, "as-written") and not _is_thinking({}, messages, "without")
    assert not _is_thinking({"thinking": False}, messages, "as-written")


def test_calls_and_results() -> None:
    calls: list[Any] = [{"id": "a", "function": {"name": "add", "arguments": '{"x": 2}'}}]
    calls.append({"function": {"name": "sub", "arguments": {}}})
    tool = {"name": "add", "parameters": {"type": "object", "properties": {"x": {}}}}
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": calls}]
    chat += [{"role": "tool", "tool_call_id": "call_1_1", "content": "0"}]
    chat += [{"role": "tool", "content": "4"}, SAID]
    messages, learned = _parse_conversation({"messages": chat}, "")
    assert learned == [1, 4] and messages[1]["tool_calls"][0] == CALL
    results = [(m["tool_call_id"], m["name"]) for m in messages[2:4]]
    assert results == [("call_1_1", "sub"), ("a", "add")]
    (shown,) = _parse_tools({"tools": [tool]})
    assert shown["type"] == "function" and shown["function"]["description"] == ""
    call = '{"name": "add", "arguments": {"x": 2}}'
    turns = (("human", "2+2?"), ("function_call", call), ("observation", "4"), ("gpt", "4"))
    sharegpt = [{"from": sender, "value": value} for sender, value in turns]
    messages, learned = _parse_conversation({"conversations": sharegpt}, "")
    assert learned == [1, 3]
    assert messages[1]["tool_calls"][0]["function"] == CALL["function"]
    result = {"role": "tool", "content": "4", "tool_call_id": "call_1_0", "name": "add"}
    assert messages[2] == result
    assert _parse_tools({"tools": '[{"name": "add"}]'})[0]["function"]["name"] == "add"
    with pytest.raises(BadLine, match=r"^`tools` is not JSON: Expecting"):
        _parse_tools({"tools": "add"})
