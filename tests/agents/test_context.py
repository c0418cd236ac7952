"""Contexts that have filled their window."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.agents.context import (
    ASK_FOR_SUMMARY,
    FULL,
    SUMMARY,
    AskFirst,
    ContextManager,
    Rewrite,
    steps_of,
)
from keel.rl.turns import Message

OPENING: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "task"}]
METHODS = ("none", "summary", "discard-75", "discard-all")


def step(number: int, results: int) -> list[Message]:
    calls = [{"id": f"{number}.{i}", "function": {"name": "t"}} for i in range(results)]
    said: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    answers: list[Message] = [
        {"role": "tool", "content": "r", "tool_call_id": call["id"]} for call in calls
    ]
    return [said, *answers]


def talk(number: int) -> list[Message]:
    return [
        {"role": "assistant", "content": f"said {number}"},
        {"role": "user", "content": f"asked {number}"},
    ]


def orphans(messages: Any) -> list[str]:
    """Results without their call, and calls without all their results."""
    asked = [call["id"] for m in messages for call in m.get("tool_calls", ())]
    answered = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
    return sorted(set(asked) ^ set(answered))


def manager(method: Any, **options: Any) -> ContextManager:
    return ContextManager(
        **{"method": method, "window": 100, "most": 3, "summary_tokens": 10} | options
    )


def test_it_is_due_from_80_percent_of_the_window_on() -> None:
    assert FULL == 0.8
    for method in METHODS:
        due = [tokens for tokens in range(100) if manager(method).due(tokens, rewrites=0)]
        assert due == ([] if method == "none" else list(range(80, 100)))
        assert not manager(method).due(99, rewrites=3)


def test_what_each_method_leaves() -> None:
    view = [*OPENING, *step(0, 1), *step(1, 2), *talk(2), *step(3, 1), *step(4, 1)]

    def left(method: str) -> list[Message]:
        done = manager(method).rewrite(OPENING, view, tokens=85, rewrites=0)
        assert isinstance(done, Rewrite) and done.added == ()
        return list(done.messages)

    assert left("discard-75") == [*OPENING, *talk(2), *step(4, 1)]
    assert left("discard-all") == [*OPENING, *talk(2)]


def test_the_summary_is_said_by_the_policy() -> None:
    view = [*OPENING, *step(0, 1), *step(1, 1)]
    asked = manager("summary").rewrite(OPENING, view, tokens=85, rewrites=0)
    assert isinstance(asked, AskFirst) and asked.before is None
    assert asked.messages == ({"role": "user", "content": ASK_FOR_SUMMARY},)
    rewrite = asked.rewritten_by(OPENING, " All well. ")
    summary = {"role": "user", "content": f"{SUMMARY}All well."}
    assert rewrite == Rewrite(messages=(*OPENING, summary), added=(summary,))


def test_a_policy_that_says_no_summary_loses_old_calls_and_not_all_it_knows() -> None:
    view = [*OPENING, *step(0, 1), *talk(1), *step(1, 1)]
    for tokens in (85, 95):
        asked = manager("summary").rewrite(OPENING, view, tokens=tokens, rewrites=0)
        assert isinstance(asked, AskFirst)
        assert asked.rewritten_by(OPENING, " \n") == Rewrite(messages=(*OPENING, *talk(1)))
    view = [*OPENING, *talk(1)]  # nothing of it may go
    asked = manager("summary").rewrite(OPENING, view, tokens=85, rewrites=0)
    assert isinstance(asked, AskFirst)
    assert asked.rewritten_by(OPENING, "") == Rewrite(messages=tuple(view))


def test_a_context_too_long_for_a_summary_is_shortened_first() -> None:
    view = [*OPENING, *step(0, 1), *step(1, 1)]
    asked = manager("summary").rewrite(OPENING, view, tokens=95, rewrites=0)
    assert isinstance(asked, AskFirst)
    assert asked.before == Rewrite(messages=(*OPENING,))
    assert manager("summary").rewrite(OPENING, [*OPENING, *talk(0)], tokens=95, rewrites=0) is None


@pytest.mark.parametrize("method", METHODS)
@settings(deadline=None)
@given(
    data=st.data(),
    opening=st.integers(1, 120),
    most=st.integers(0, 4),
)
def test_it_ends_and_keeps_what_belongs_together(
    method: str, data: st.DataObject, opening: int, most: int
) -> None:
    """A policy that never ends by itself: the trajectory ends at its window or within its rewrites,
    whatever the lengths."""
    context = manager(method, most=most)
    lengths = st.integers(0, 60)
    size = {id(message): 1 for message in OPENING} | {id(OPENING[-1]): opening}
    view = list(OPENING)
    rewrites = turns = 0

    def tokens() -> int:
        return sum(size[id(message)] for message in view)

    def check(messages: Any) -> list[Message]:
        assert list(messages[:2]) == OPENING
        assert orphans(messages) == []
        assert messages[-1]["role"] in ("user", "tool"), "the policy can speak"
        return list(messages)

    while tokens() < context.window:
        assert turns <= 100 * (most + 1) + 1, "each turn takes a token, each rewrite counts"
        done = context.rewrite(OPENING, view, tokens=tokens(), rewrites=rewrites)
        if isinstance(done, AskFirst):
            if done.before:
                view = check(done.before.messages)
            done = done.rewritten_by(OPENING, "words")
            size[id(done.added[0])] = data.draw(st.integers(1, 10))
        if isinstance(done, Rewrite):
            assert tokens() >= FULL * context.window or method == "summary"
            shorter = check(done.messages)
            assert method == "summary" or len(shorter) < len(view)
            view = shorter
            rewrites += 1
        turns += 1
        new = step(turns, data.draw(st.integers(1, 3))) if data.draw(st.booleans()) else talk(turns)
        size |= {id(message): data.draw(lengths) for message in new} | {id(new[0]): 1}
        view += new
    assert rewrites <= most


def test_steps_hold_a_call_and_its_results() -> None:
    assert steps_of([*step(0, 2), *talk(1), *step(2, 1)]) == [
        step(0, 2),
        [talk(1)[0]],
        [talk(1)[1]],
        step(2, 1),
    ]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"method": "discard"}, "discard-75"),
        ({"window": 0}, "window of 0"),
        ({"most": -1}, "-1 rewrites"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        manager(**{"method": "summary"} | options)
