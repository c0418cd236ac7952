"""Rewriting a context that has filled its window."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.agents.context import SUMMARY, AskFirst, ContextManager, Rewrite
from keel.rl.turns import Message

OPENING: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "task"}]
METHODS = ("none", "summary", "discard-75", "discard-all")


def step(number: int, results: int) -> list[Message]:
    calls = [{"id": f"{number}.{i}", "function": {"name": "t"}} for i in range(results)]
    turn: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    return [turn, *({"role": "tool", "content": "r", "tool_call_id": c["id"]} for c in calls)]


def talk(number: int) -> list[Message]:
    return [
        {"role": "assistant", "content": f"answer {number}"},
        {"role": "user", "content": f"question {number}"},
    ]


def manager(method: Any, **options: Any) -> ContextManager:
    return ContextManager(
        **{"method": method, "window": 100, "most": 3, "summary_tokens": 10} | options
    )


def rewrite(method: str, view: list[Message], tokens: int = 85) -> Any:
    return manager(method).rewrite(OPENING, view, tokens=tokens, rewrites=0)


def test_rewrite_is_due_from_80_percent() -> None:
    view = [*OPENING, *step(0, 1)]
    for method in METHODS:
        due = [tokens for tokens in range(100) if rewrite(method, view, tokens)]
        assert due == ([] if method == "none" else list(range(80, 100)))
        assert not manager(method).rewrite(OPENING, view, tokens=99, rewrites=3)


def test_discard_removes_the_oldest_calls() -> None:
    view = [*OPENING, *step(0, 1), *step(1, 2), *talk(2), *step(3, 1), *step(4, 1)]
    rest = (*OPENING, *talk(2), *step(4, 1))
    assert rewrite("discard-75", view) == Rewrite(messages=rest)
    assert rewrite("discard-all", view) == Rewrite(messages=(*OPENING, *talk(2)))


def test_summary_is_asked_for_where_it_fits() -> None:
    view, plain = [*OPENING, *step(0, 1), *step(1, 1)], [*OPENING, *talk(0)]
    question = rewrite("summary", view, 90)
    assert question.before is None and rewrite("summary", plain, 90) is not None
    assert rewrite("summary", view, 91).before == Rewrite(messages=(*OPENING,))
    assert rewrite("summary", plain, 91) is None
    summary = {"role": "user", "content": f"{SUMMARY}All well."}
    expected = Rewrite(messages=(*OPENING, summary), added=(summary,))
    assert question.rewritten_by(OPENING, " All well. ") == expected
    assert question.rewritten_by(OPENING, " \n") == Rewrite(messages=(*OPENING,))


@pytest.mark.parametrize("method", METHODS)
@settings(deadline=None)
@given(data=st.data(), opening=st.integers(1, 120), most=st.integers(1, 4))
def test_endless_policy_ends_with_calls_intact(
    method: str, data: st.DataObject, opening: int, most: int
) -> None:
    context = manager(method, most=most)
    lengths = st.integers(0, 60)
    size = {id(message): 1 for message in OPENING} | {id(OPENING[-1]): opening}
    view = list(OPENING)
    rewrites = turns = 0

    def tokens() -> int:
        return sum(size[id(message)] for message in view)

    def check(messages: Any) -> list[Message]:
        assert list(messages[:2]) == OPENING
        calls = [call["id"] for m in messages for call in m.get("tool_calls", ())]
        results = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
        assert sorted(calls) == sorted(results), "a call without its result, or the reverse"
        assert messages[-1]["role"] in ("user", "tool"), "the policy can speak"
        return list(messages)

    while tokens() < context.window:
        assert turns <= 100 * (most + 1) + 1, "each turn takes a token, each rewrite counts"
        action = context.rewrite(OPENING, view, tokens=tokens(), rewrites=rewrites)
        if isinstance(action, AskFirst):
            if action.before:
                view = check(action.before.messages)
            action = action.rewritten_by(OPENING, "words")
            size[id(action.added[0])] = data.draw(st.integers(1, 10))
        if isinstance(action, Rewrite):
            assert tokens() >= 0.8 * context.window or method == "summary"
            shorter = check(action.messages)
            assert method == "summary" or len(shorter) < len(view)
            view = shorter
            rewrites += 1
        turns += 1
        new = step(turns, data.draw(st.integers(1, 3))) if data.draw(st.booleans()) else talk(turns)
        size |= {id(message): data.draw(lengths) for message in new} | {id(new[0]): 1}
        view += new
    assert rewrites <= most
