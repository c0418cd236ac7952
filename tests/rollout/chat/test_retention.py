"""Tests which thinking is kept, compared with the rule that DeepSeek publishes."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from keel.rollout.chat.render import _deepseek_code, retained

ASSISTANT = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.text(max_size=3)},
    optional={
        "reasoning_content": st.text(max_size=3),
        "tool_calls": st.just([{"id": "a"}]),
    },
)
OTHERS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "developer", "tool"]),
        "content": st.text(max_size=3),
    }
)


def renamed(messages: list[Any], old: str, new: str) -> list[dict[str, Any]]:
    return [{(new if key == old else key): v for key, v in m.items()} for m in messages]


@settings(deadline=None)
@given(st.lists(st.one_of(ASSISTANT, OTHERS), max_size=12))
def test_thinking_goes_as_deepseeks_own_code_says(messages: list[dict[str, Any]]) -> None:
    oracle = _deepseek_code().drop_thinking_messages(
        renamed(messages, "reasoning_content", "reasoning")
    )
    # That code also drops earlier developer messages; ours keeps them.
    ours = renamed(retained(messages), "reasoning_content", "reasoning")
    assert [m for m in ours if m["role"] != "developer"] == [
        m for m in oracle if m["role"] != "developer"
    ]
    assert len(ours) == len(messages)


def test_it_stays_while_tools_answer() -> None:
    said = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": []}
    tool, user = {"role": "tool", "content": "1"}, {"role": "user", "content": "?"}
    assert retained([user, said, tool, said, tool]) == [user, said, tool, said, tool]
    kept = retained([user, said, tool, user, said])
    assert "reasoning_content" not in kept[1] and kept[4] == said
    assert kept[1]["tool_calls"] == [] and kept[2] == tool
