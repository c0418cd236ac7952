"""Requests become turns: extensions, forks, retries, budgets; each sampled token trained once."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keel.agents.conversation import MALFORMED
from keel.agents.endpoint.errors import ApiError
from keel.agents.endpoint.record import Finished, TrajectoryRecorder
from keel.rl.types import PROGRAM
from tests.agents.endpoint.kit import (
    CHAT,
    TOOLS,
    Messages,
    Policy,
    as_sent,
    ask,
    check_law,
    play,
    recording,
    result,
    user,
)
from tests.rollout.chat.families import chat_of

OTHER = [{"type": "function", "function": {"name": "hotel", "description": "Books."}}]


def script(context: str, turn: int) -> str:
    """Calls once, twice, none, …; thinks where it may."""
    thought = "" if "<think>\n\n</think>" in context[-24:] else f"<think>\nhm {turn}\n</think>\n\n"
    calls = ["", '\n@city "Rome"', '\n@city "Rome", 2\n@city "Oslo", 3.0'][turn % 3]
    return f"{thought}turn {turn}{calls if 'Tools:' in context else ''}"


def hermes(context: str, turn: int) -> str:
    """The same in another format, whose tokens depend on what stands beside them."""
    body = '{"name": "city", "arguments": {"name": "R\u00f4me", "days": 3.0}}'
    call = f"\n<tool_call>\n{body}\n</tool_call>"
    thinks = "<think>" in context and "<think>\n\n</think>" not in context[-24:]
    thought = f"<think>\nhm {turn}\n</think>\n\n" if thinks or turn % 2 else ""
    return f"{thought}turn {turn}{call * (turn % 3)}"


async def loop(
    recorded: TrajectoryRecorder, messages: Messages, turns: int, *, users: bool = True
) -> None:
    """An agent's loop."""
    for _ in range(turns):
        reply = await ask(recorded, messages, TOOLS)
        messages.append(as_sent(reply))
        calls = reply.message.get("tool_calls", ())
        messages += [result(call["id"], f"{call['id']} <|im_end|> done") for call in calls]
        if not calls:
            messages.append(user("Go on."))


def test_twelve_turns_are_one_segment() -> None:
    policy = Policy(script)

    async def work() -> Finished:
        recorded = recording(policy)
        messages = [{"role": "system", "content": "Be brief."}, user("Where to?")]
        await loop(recorded, messages, 12)
        return await recorded.finish()

    finished = play(work())
    check_law(policy, finished)
    (segment,) = finished.segments
    for before, after in zip(policy.turns, policy.turns[1:], strict=False):
        assert after[0][: len(before[0]) + len(before[1])] == before[0] + before[1]
    # A tool's text that spells a control token is text.
    text = CHAT.decode(segment.token_ids_T.tolist())
    assert " <|im_end|> done" not in text
    turns = text.count("<|im_start|>assistant")
    assert turns == 12 == finished.usage.turns
    assert (finished.usage.calls, finished.usage.failed_calls) == (12, 0)
    assert (finished.counts.extended, finished.counts.rendered) == (11, 1)
    assert finished.finish_reason == "stop" and not finished.failure
    roles = [message["role"] for message in (*finished.opening, *finished.messages)]
    assert roles[:6] == ["system", "user", "assistant", "user", "assistant", "tool"]
    assert roles.count("assistant") == 12


def test_tools_inside_the_thinking_leave_it_open_for_the_next_turn() -> None:
    policy = Policy(['<think>\nhm\n@city "Rome"', 'more\n@city "Oslo"', "so\n</think>\n\nDone."])
    chat = chat_of("tiny", tools_in_thinking=True)

    async def work() -> tuple[Messages, Finished]:
        recorded = recording(policy, chat=chat, thinking=True)
        messages = [user("Where to?")]
        await loop(recorded, messages, 3)
        return messages, await recorded.finish()

    messages, finished = play(work())
    check_law(policy, finished)
    assert len(finished.segments) == 1
    called = [len(m.get("tool_calls", ())) for m in messages if m["role"] == "assistant"]
    assert called == [1, 1, 0] and messages[-2]["content"] == "Done."
    assert (finished.usage.calls, finished.usage.malformed_calls) == (2, 0)


def test_thinking_stays_while_tools_answer_and_a_user_begins_a_segment() -> None:
    policy = Policy(script)

    async def work() -> Finished:
        recorded = recording(policy, thinking=True)
        await loop(recorded, [user("Where to?")], 7)
        return await recorded.finish()

    finished = play(work())
    check_law(policy, finished)
    # Turns 0 and 3 and 6 call nothing: a user's message follows, and the thinking goes.
    assert [int(s.version_T.max()) for s in finished.segments] == [0, 3, 6]
    texts = [CHAT.decode(s.token_ids_T.tolist()) for s in finished.segments]
    assert all(f"hm {turn}" in texts[1] for turn in (1, 2, 3)) and "hm 0" not in texts[1]


def test_thinking_that_the_client_dropped_is_in_a_render_within_the_tool_cycle() -> None:
    policy = Policy(['<think>\nplan\n</think>\n\n@city "Rome"', "done"])

    async def work() -> Finished:
        recorded = recording(policy, thinking=True)
        messages = [user("Where to?")]
        reply = await ask(recorded, messages, TOOLS)
        assert reply.message["reasoning_content"] == "plan"
        messages += [as_sent(reply), result("call_0_0", "far")]
        await ask(recorded, messages, [*TOOLS, *OTHER])
        return await recorded.finish()

    finished = play(work())
    check_law(policy, finished)
    assert finished.counts.rendered == 2
    assert "plan" in CHAT.decode(finished.segments[1].token_ids_T.tolist())


def test_changed_tools_or_messages_fork() -> None:
    policy = Policy(["one", "two", "three", "four"])

    async def work() -> Finished:
        recorded = recording(policy)
        first = await ask(recorded, [user("a")], TOOLS)
        await ask(recorded, [user("a"), as_sent(first), user("b")], OTHER)  # other tools
        edited = {**as_sent(first), "content": "One."}
        await ask(recorded, [user("a"), edited, user("b")], TOOLS)  # not what was handed out
        await ask(recorded, [user("a"), as_sent(first), user("b")], TOOLS)  # as it was
        return await recorded.finish()

    finished = play(work())
    check_law(policy, finished)
    assert (finished.counts.rendered, finished.counts.extended) == (3, 1)
    assert [int(s.trainable_T.sum()) for s in finished.segments] == [3 + 1 + 4 + 1, 4, 6]


@pytest.mark.parametrize("change", ["\n{}", "{}\n ", " {}"])
def test_white_space_around_a_turn_extends_it(change: str) -> None:
    policy = Policy(script)

    async def work() -> Finished:
        recorded = recording(policy)
        messages = [user("Where to?")]
        for _ in range(4):
            said = as_sent(await ask(recorded, messages))
            messages += [{**said, "content": change.format(said["content"])}, user("Go on.")]
        return await recorded.finish()

    finished = play(work())
    check_law(policy, finished)
    assert (finished.counts.extended, len(finished.segments)) == (3, 1)


def test_a_render_that_begins_with_recorded_ids_extends_them() -> None:
    """A system message cannot extend a conversation; its render may still go on from the turn."""
    policy = Policy(["one", "two"], "hermes")

    async def work() -> Finished:
        recorded = recording(policy, chat=chat_of("hermes"))
        said = as_sent(await ask(recorded, [user("a")]))
        note = {"role": "system", "content": "s"}
        await ask(recorded, [user("a"), said, note, user("b")])
        return await recorded.finish()

    finished = play(work())
    check_law(policy, finished)
    assert (finished.counts.extended, len(finished.segments)) == (1, 1)


def test_what_the_program_says_for_the_policy_is_marked_as_its_own() -> None:
    async def work() -> Finished:
        recorded = recording(Policy(["one", "two"]))
        said = as_sent(await ask(recorded, [user("a")]))
        own = {"role": "assistant", "content": "made up"}
        await ask(recorded, [user("a"), said, user("b"), own, user("c")])
        return await recorded.finish()

    told = [(m["content"], m.get("name")) for m in play(work()).messages]
    assert told == [("one", None), ("b", None), ("made up", PROGRAM), ("c", None), ("two", None)]


def test_requests_from_the_same_turn_keep_its_ids() -> None:
    policy = Policy(script)

    async def work() -> Finished:
        recorded = recording(policy, thinking=True)
        opening = [user("a")]
        for _ in range(2):  # the second has a call
            opening = [user("a"), as_sent(await ask(recorded, [user("a")], TOOLS))]
        call = opening[-1]["tool_calls"][0]["id"]
        policy.hold = asyncio.Event()
        branches = [
            asyncio.create_task(ask(recorded, [*opening, result(call, f"{i}")], TOOLS))
            for i in range(3)
        ]
        while len(policy.requests) < 5:
            await asyncio.sleep(0)
        policy.hold.set()
        await asyncio.gather(*branches)
        return await recorded.finish()

    finished = play(work())
    check_law(policy, finished)
    counts = finished.counts
    assert (counts.rendered, counts.extended, counts.branched) == (2, 1, 2)
    before = policy.turns[1][0] + policy.turns[1][1]
    assert all(context[: len(before)] == before for context, _ in policy.turns[2:])
    assert len({request.seed for request in policy.requests}) == 5


def test_the_end_gives_up_what_is_being_sampled() -> None:
    policy = Policy(["one"])
    policy.hold = asyncio.Event()

    async def work() -> None:
        recorded = recording(policy)
        task = asyncio.create_task(ask(recorded, [user("a")]))
        while not policy.requests:
            await asyncio.sleep(0)
        finished = await recorded.finish()
        assert finished.segments == ()
        for late in (task, ask(recorded, [user("a")])):
            with pytest.raises(ApiError, match="is over"):
                await late

    play(work())


def test_what_is_no_call_is_one_that_can_be_answered() -> None:
    policy = Policy(["@city Rome", "done"])

    async def work() -> Finished:
        recorded = recording(policy)
        reply = await ask(recorded, [user("a")], TOOLS)
        (call,) = reply.message["tool_calls"]
        assert call["function"]["name"] == MALFORMED
        await ask(recorded, [user("a"), as_sent(reply), result(call["id"], "no tool")], TOOLS)
        return await recorded.finish()

    finished = play(work())
    check_law(policy, finished)
    assert len(finished.segments) == 1
    usage = finished.usage
    assert (usage.calls, usage.failed_calls, usage.malformed_calls) == (1, 1, 1)


def test_results_are_shown_in_the_order_of_the_calls() -> None:
    async def work(step: int) -> list[int]:
        policy = Policy(['@city "Rome"\n@city "Oslo"', "done"])
        recorded = recording(policy)
        reply = await ask(recorded, [user("a")], TOOLS)
        results = [result("call_0_0", "first"), result("call_0_1", "second")][::step]
        await ask(recorded, [user("a"), as_sent(reply), *results], TOOLS)
        return policy.turns[1][0]

    assert play(work(1)) == play(work(-1))


def test_calls_are_not_handed_out_where_none_are_wanted() -> None:
    async def work() -> None:
        reply = await ask(
            recording(Policy(['so\n@city "Rome"'])), [user("a")], TOOLS, tool_choice="none"
        )
        assert reply.message == {"role": "assistant", "content": "so"}

    play(work())


def mangled(message: dict[str, Any], how: str) -> dict[str, Any]:
    """What clients make of a message."""
    message = dict(reversed(copy.deepcopy(message).items()))
    if how == "parts" and message.get("content"):
        message["content"] = [{"type": "text", "text": message["content"]}]
    if how == "empty" and message["role"] == "assistant":
        message["content"] = message["content"] or ""
        message |= {"name": "agent", "refusal": None, "function_call": None, "audio": None}
    if how == "thought" and message["role"] == "assistant":
        message["reasoning_content"] = "its own summary of it"
    return message


STEP = st.tuples(
    st.sampled_from(["on", "on", "on", "copy", "back", "edit", "tools", "same"]),
    st.integers(0, 5),  # which conversation
    st.sampled_from(["as is", "parts", "empty", "thought"]),
    st.booleans(),  # with the step before it, at once
)


@pytest.mark.parametrize("family", ["tiny", "qwen3", "hermes"])
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEP, min_size=1, max_size=9), thinking=st.booleans())
def test_every_sampled_token_is_trained_once_in_the_context_it_was_sampled_in(
    family: str, steps: list[Any], thinking: bool
) -> None:
    policy = Policy(script if family == "tiny" else hermes, family)

    async def go_on(recorded: TrajectoryRecorder, talk: dict[str, Any], how: str) -> None:
        messages = [mangled(message, how) for message in talk["messages"]]
        reply = await ask(recorded, messages, talk["tools"])
        calls = reply.message.get("tool_calls", ())
        talk["messages"] = [
            *talk["messages"],
            as_sent(reply),
            *[result(call["id"], "<think>7") for call in reversed(calls)],
            *([] if calls else [user("On.")]),
        ]

    async def work() -> Finished:
        recorded = recording(policy, thinking=thinking, chat=chat_of(family))
        talks: list[dict[str, Any]] = [{"messages": [user("Where to?")], "tools": TOOLS}]
        pending: list[asyncio.Task[None]] = []
        for what, which, how, at_once in steps:
            if not at_once:
                await asyncio.gather(*pending)
                pending = []
            talk = talks[which % len(talks)]
            if what != "on":
                talk = copy.deepcopy(talk)
                talks.append(talk)
            if what == "back":
                talk["messages"] = talk["messages"][:1]
            if what == "edit":
                talk["messages"][0] = user("Where else?")
            if what == "tools":
                talk["tools"] = OTHER
            pending.append(asyncio.create_task(go_on(recorded, talk, how)))
        await asyncio.gather(*pending)
        return await recorded.finish()

    finished = play(work())
    check_law(policy, finished)
    assert finished.usage.turns == len(steps) == finished.counts.requests
