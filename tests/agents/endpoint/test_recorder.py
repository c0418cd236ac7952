"""Requests become turns: extensions, forks, retries; each sampled token is trained once."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keel.agents.conversation import MALFORMED
from keel.agents.endpoint.recorder import Finished, TrajectoryRecorder
from keel.agents.endpoint.requests import ApiError, IgnoredFields, read_request
from keel.agents.endpoint.turn_index import key_of_tools, prefix_keys
from keel.data.conversations.files import read_trajectories
from keel.data.eval_store import asked_of
from keel.rl.records import trajectory_record
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import PROGRAM, Group, Prompt, ScoredGroup, Segment, Trajectory
from keel.trainer.prepare import chat_renderer
from tests.agents.endpoint.kit import (
    CHAT,
    TOOLS,
    Messages,
    Policy,
    as_sent,
    ask,
    check_law,
    play,
    recorder_of,
    result,
    script,
    user,
)
from tests.data.conversations.sources import source
from tests.rollout.chat.families import CITY, chat_of

OTHER = [{"type": "function", "function": {"name": "hotel", "description": "Books."}}]


def hermes(context: str, turn: int) -> str:
    """Like `script`, in a format whose tokens depend on their neighbors."""
    body = '{"name": "city", "arguments": {"name": "R\u00f4me", "days": 3.0}}'
    call = f"\n<tool_call>\n{body}\n</tool_call>"
    thinks = "<think>" in context and "<think>\n\n</think>" not in context[-24:]
    thought = f"<think>\nhm {turn}\n</think>\n\n" if thinks or turn % 2 else ""
    return f"{thought}turn {turn}{call * (turn % 3)}"


async def loop(recorder: TrajectoryRecorder, messages: Messages, turns: int) -> None:
    """Run an agent's loop."""
    for _ in range(turns):
        reply = await ask(recorder, messages, TOOLS)
        messages.append(as_sent(reply))
        calls = reply.message.get("tool_calls", ())
        messages += [result(call["id"], f"{call['id']} <|im_end|> done") for call in calls]
        if not calls:
            messages.append(user("Go on."))


def test_twelve_turns_form_one_segment() -> None:
    policy = Policy(script)

    async def work() -> Finished:
        recorder = recorder_of(policy)
        await loop(recorder, [{"role": "system", "content": "Be brief."}, user("Where to?")], 12)
        return await recorder.finish()

    finished = play(work())
    check_law(policy, finished)
    (segment,) = finished.segments
    for before, after in zip(policy.turns, policy.turns[1:], strict=False):
        assert after[0][: len(before[0]) + len(before[1])] == before[0] + before[1]
    text = CHAT.decode(segment.token_ids_T.tolist())
    assert " <|im_end|> done" not in text, "a control text in a tool result must stay text"
    assert text.count("<|im_start|>assistant") == 12 == finished.usage.turns
    assert (finished.usage.calls, finished.usage.failed_calls) == (12, 0)
    assert (finished.counts.extended, finished.counts.rendered) == (11, 1)
    assert finished.finish_reason == "stop" and not finished.failure
    roles = [message["role"] for message in (*finished.opening, *finished.messages)]
    assert roles[:6] == ["system", "user", "assistant", "user", "assistant", "tool"]
    assert roles.count("assistant") == 12


def test_calls_in_thinking_continue_the_segment() -> None:
    policy = Policy(['<think>\nhm\n@city "Rome"', 'more\n@city "Oslo"', "so\n</think>\n\nDone."])

    async def work() -> tuple[Messages, Finished]:
        recorder = recorder_of(policy, chat=chat_of("tiny", tools_in_thinking=True), thinking=True)
        messages = [user("Where to?")]
        await loop(recorder, messages, 3)
        return messages, await recorder.finish()

    messages, finished = play(work())
    check_law(policy, finished)
    assert len(finished.segments) == 1
    calls = [len(m.get("tool_calls", ())) for m in messages if m["role"] == "assistant"]
    assert calls == [1, 1, 0] and messages[-2]["content"] == "Done."
    assert (finished.usage.calls, finished.usage.malformed_calls) == (2, 0)


def test_user_message_ends_thinking_and_segment() -> None:
    policy = Policy(script)

    async def work() -> Finished:
        recorder = recorder_of(policy, thinking=True)
        await loop(recorder, [user("Where to?")], 7)
        return await recorder.finish()

    finished = play(work())
    check_law(policy, finished)
    # Turns 0, 3 and 6 make no call, so a user message follows and drops the thinking.
    assert [int(s.version_T.max()) for s in finished.segments] == [0, 3, 6]
    texts = [CHAT.decode(s.token_ids_T.tolist()) for s in finished.segments]
    assert all(f"hm {turn}" in texts[1] for turn in (1, 2, 3)) and "hm 0" not in texts[1]


def test_render_restores_thinking_that_the_client_dropped() -> None:
    policy = Policy(['<think>\nplan\n</think>\n\n@city "Rome"', "done"])

    async def work() -> Finished:
        recorder = recorder_of(policy, thinking=True)
        reply = await ask(recorder, [user("Where to?")], TOOLS)
        assert reply.message["reasoning_content"] == "plan"
        messages = [user("Where to?"), as_sent(reply), result("call_0_0", "far")]
        await ask(recorder, messages, [*TOOLS, *OTHER])
        return await recorder.finish()

    finished = play(work())
    check_law(policy, finished)
    assert finished.counts.rendered == 2
    assert "plan" in CHAT.decode(finished.segments[1].token_ids_T.tolist())


def test_changed_tools_or_messages_fork() -> None:
    policy = Policy(["one", "two", "three", "four"])

    async def work() -> Finished:
        recorder = recorder_of(policy)
        turn = as_sent(await ask(recorder, [user("a")], TOOLS))
        await ask(recorder, [user("a"), turn, user("b")], OTHER)
        await ask(recorder, [user("a"), {**turn, "content": "One."}, user("b")], TOOLS)
        await ask(recorder, [user("a"), turn, user("b")], TOOLS)
        return await recorder.finish()

    finished = play(work())
    check_law(policy, finished)
    assert (finished.counts.rendered, finished.counts.extended) == (3, 1)
    assert [int(s.trainable_T.sum()) for s in finished.segments] == [3 + 1 + 4 + 1, 4, 6]


@pytest.mark.parametrize("change", ["\n{}", "{}\n ", " {}"])
def test_added_white_space_still_extends(change: str) -> None:
    policy = Policy(script)

    async def work() -> Finished:
        recorder = recorder_of(policy)
        messages = [user("Where to?")]
        for _ in range(4):
            turn = as_sent(await ask(recorder, messages))
            messages += [{**turn, "content": change.format(turn["content"])}, user("Go on.")]
        return await recorder.finish()

    finished = play(work())
    check_law(policy, finished)
    assert (finished.counts.extended, len(finished.segments)) == (3, 1)


def test_render_that_begins_with_recorded_ids_extends() -> None:
    policy = Policy(["one", "two"], "hermes")

    async def work() -> Finished:
        recorder = recorder_of(policy, chat=chat_of("hermes"))
        turn = as_sent(await ask(recorder, [user("a")]))
        await ask(recorder, [user("a"), turn, {"role": "system", "content": "s"}, user("b")])
        return await recorder.finish()

    finished = play(work())
    check_law(policy, finished)
    assert (finished.counts.extended, len(finished.segments)) == (1, 1)


def test_assistant_messages_of_the_program_are_marked() -> None:
    async def work() -> Finished:
        recorder = recorder_of(Policy(["one", "two"]))
        turn = as_sent(await ask(recorder, [user("a")]))
        invented = {"role": "assistant", "content": "made up"}
        await ask(recorder, [user("a"), turn, user("b"), invented, user("c")])
        return await recorder.finish()

    messages = [(m["content"], m.get("name")) for m in play(work()).messages]
    assert messages == [
        *(("one", None), ("b", None), ("made up", PROGRAM), ("c", None), ("two", None))
    ]


def test_branches_from_one_turn_keep_its_ids() -> None:
    policy = Policy(script)

    async def work() -> Finished:
        recorder = recorder_of(policy, thinking=True)
        opening = [user("a")]
        for _ in range(2):  # the second turn has a call
            opening = [user("a"), as_sent(await ask(recorder, [user("a")], TOOLS))]
        call = opening[-1]["tool_calls"][0]["id"]
        policy.hold = asyncio.Event()
        branches = [
            asyncio.create_task(ask(recorder, [*opening, result(call, f"{i}")], TOOLS))
            for i in range(3)
        ]
        while len(policy.requests) < 5:
            await asyncio.sleep(0)
        policy.hold.set()
        await asyncio.gather(*branches)
        return await recorder.finish()

    finished = play(work())
    check_law(policy, finished)
    counts = finished.counts
    assert (counts.rendered, counts.extended, counts.branched) == (2, 1, 2)
    before = policy.turns[1][0] + policy.turns[1][1]
    assert all(context[: len(before)] == before for context, _ in policy.turns[2:])
    assert len({request.seed for request in policy.requests}) == 5


def test_finish_cancels_turns_in_flight() -> None:
    policy = Policy(["one"])
    policy.hold = asyncio.Event()

    async def work() -> None:
        recorder = recorder_of(policy)
        task = asyncio.create_task(ask(recorder, [user("a")]))
        while not policy.requests:
            await asyncio.sleep(0)
        assert (await recorder.finish()).segments == ()
        for late in (task, ask(recorder, [user("a")])):
            with pytest.raises(ApiError) as error:
                await late
            assert error.value.code == "trajectory_over"

    play(work())


def test_malformed_call_can_be_answered() -> None:
    policy = Policy(["@city Rome", "done"])

    async def work() -> Finished:
        recorder = recorder_of(policy)
        reply = await ask(recorder, [user("a")], TOOLS)
        (call,) = reply.message["tool_calls"]
        assert call["function"]["name"] == MALFORMED
        await ask(recorder, [user("a"), as_sent(reply), result(call["id"], "no tool")], TOOLS)
        return await recorder.finish()

    finished = play(work())
    check_law(policy, finished)
    assert len(finished.segments) == 1
    usage = finished.usage
    assert (usage.calls, usage.failed_calls, usage.malformed_calls) == (1, 1, 1)


def test_results_are_rendered_in_call_order() -> None:
    async def work(step: int) -> list[int]:
        policy = Policy(['@city "Rome"\n@city "Oslo"', "done"])
        recorder = recorder_of(policy)
        reply = await ask(recorder, [user("a")], TOOLS)
        results = [result("call_0_0", "first"), result("call_0_1", "second")][::step]
        await ask(recorder, [user("a"), as_sent(reply), *results], TOOLS)
        return policy.turns[1][0]

    assert play(work(1)) == play(work(-1))


def test_tool_choice_none_hides_calls() -> None:
    policy = Policy(['so\n@city "Rome"'])
    reply = play(ask(recorder_of(policy), [user("a")], TOOLS, tool_choice="none"))
    assert reply.message == {"role": "assistant", "content": "so"}


def mangled(message: dict[str, Any], how: str) -> dict[str, Any]:
    """Change a message as clients do."""
    message = dict(reversed(copy.deepcopy(message).items()))
    if how == "parts" and message.get("content"):
        message["content"] = [{"type": "text", "text": message["content"]}]
    if how == "empty" and message["role"] == "assistant":
        message["content"] = message["content"] or ""
        message |= {"name": "agent", "refusal": None, "function_call": None, "audio": None}
    if how == "thought" and message["role"] == "assistant":
        message["reasoning_content"] = "the client's summary"
    return message


STEP = st.tuples(
    st.sampled_from(["on", "on", "on", "copy", "back", "edit", "tools", "same"]),
    st.integers(0, 5),  # conversation
    st.sampled_from(["verbatim", "parts", "empty", "thought"]),
    st.booleans(),  # concurrent with the previous step
)


@pytest.mark.parametrize("family", ["tiny", "qwen3", "hermes"])
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEP, min_size=1, max_size=9), thinking=st.booleans())
def test_every_sampled_token_is_trained_exactly_once(
    family: str, steps: list[Any], thinking: bool
) -> None:
    policy = Policy(script if family == "tiny" else hermes, family)

    async def take_turn(recorder: TrajectoryRecorder, talk: dict[str, Any], how: str) -> None:
        messages = [mangled(message, how) for message in talk["messages"]]
        reply = await ask(recorder, messages, talk["tools"])
        calls = reply.message.get("tool_calls", ())
        talk["messages"] = [
            *talk["messages"],
            as_sent(reply),
            *[result(call["id"], "<think>7") for call in reversed(calls)],
            *([] if calls else [user("On.")]),
        ]

    async def work() -> Finished:
        recorder = recorder_of(policy, thinking=thinking, chat=chat_of(family))
        talks: list[dict[str, Any]] = [{"messages": [user("Where to?")], "tools": TOOLS}]
        pending: list[asyncio.Task[None]] = []
        for action, which, how, concurrent in steps:
            if not concurrent:
                await asyncio.gather(*pending)
                pending = []
            talk = talks[which % len(talks)]
            if action != "on":
                talk = copy.deepcopy(talk)
                talks.append(talk)
            if action == "back":
                talk["messages"] = talk["messages"][:1]
            if action == "edit":
                talk["messages"][0] = user("Where else?")
            if action == "tools":
                talk["tools"] = OTHER
            pending.append(asyncio.create_task(take_turn(recorder, talk, how)))
        await asyncio.gather(*pending)
        return await recorder.finish()

    finished = play(work())
    check_law(policy, finished)
    assert finished.usage.turns == len(steps) == finished.counts.requests


def test_lost_answer_is_resent_and_received_one_not() -> None:
    policy = Policy(["one", "two", "three"])

    async def work() -> Finished:
        recorder = recorder_of(policy)
        first = await ask(recorder, [user("a")])
        assert await ask(recorder, [user("a")], is_retry=True) is first
        second = await ask(recorder, [user("a")])  # asks for another sample
        assert second.message["content"] == "two"
        recorder.mark_lost(second)
        assert await ask(recorder, [user("a")]) is second
        assert (await ask(recorder, [user("a")])).message["content"] == "three"
        return await recorder.finish()

    finished = play(work())
    check_law(policy, finished)
    assert (finished.counts.repeated, finished.usage.turns) == (2, 3)
    assert len({request.seed for request in policy.requests}) == 3


def test_retry_prefers_the_lost_answer() -> None:
    async def work() -> Finished:
        recorder = recorder_of(Policy(["one", "two"]))
        replies = [await ask(recorder, [user("a")]) for _ in range(2)]
        recorder.mark_lost(replies[1])
        assert await ask(recorder, [user("a")], is_retry=True) is replies[1]
        return await recorder.finish()

    assert play(work()).counts.repeated == 1


def test_retry_of_a_failure_gets_no_siblings_answer() -> None:
    policy = Policy(["one", "two"])

    async def first_fails(request: TurnRequest) -> TurnResult:
        if policy.requests:
            return await policy(request)
        policy.requests.append(request)
        while len(policy.requests) < 2:
            await asyncio.sleep(0)
        raise RuntimeError("engine 3 died")

    async def work() -> Finished:
        recorder = recorder_of(first_fails)
        both = (ask(recorder, [user("a")]) for _ in range(2))
        failure, _ = await asyncio.gather(*both, return_exceptions=True)
        assert isinstance(failure, ApiError) and "engine 3 died" in failure.message
        retried = await ask(recorder, [user("a")], is_retry=True)
        assert retried.message["content"] == "two"
        return await recorder.finish()

    check_law(policy, play(work()))
    first, other, retried = (request.seed for request in policy.requests)
    assert retried == first != other


def test_failed_and_cancelled_turns_are_resampled_alike() -> None:
    policy = Policy(["one", "two"])

    async def work() -> Finished:
        recorder = recorder_of(policy)
        messages = [user("a")]
        messages += [as_sent(await ask(recorder, messages)), user("b")]
        policy.fail = RuntimeError("engine 3 died")
        with pytest.raises(ApiError) as error:
            await ask(recorder, messages)
        assert error.value.status == 503
        policy.fail, policy.hold = None, asyncio.Event()
        task = asyncio.create_task(ask(recorder, messages))
        while len(policy.requests) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        policy.hold = None
        await ask(recorder, messages, is_retry=True)
        return await recorder.finish()

    finished = play(work())
    check_law(policy, finished)
    assert len(finished.segments) == 1
    assert len({request.seed for request in policy.requests[1:]}) == 1
    assert (finished.counts.failed, finished.counts.cancelled, finished.usage.turns) == (1, 1, 2)
    assert "engine 3 died" in finished.failure


ARGUMENTS = {"name": "Rome \u00e9", "days": 2}


def keys(fields: dict[str, Any], arguments: str) -> list[str]:
    function = {"name": "city", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    messages = [
        user("a"),
        {"role": "assistant", "tool_calls": [call], **fields},
        result("c", "b"),
    ]
    body = json.dumps({"messages": messages}).encode()
    return prefix_keys(read_request(body, IgnoredFields()).messages)


@pytest.mark.parametrize(
    ("fields", "arguments", "same"),
    [
        ({}, json.dumps(ARGUMENTS), True),
        ({"content": None, "refusal": None, "name": "agent"}, json.dumps(ARGUMENTS), True),
        ({"content": [], "reasoning_content": "more"}, json.dumps(ARGUMENTS, indent=2), True),
        ({"content": "\n \n"}, json.dumps(ARGUMENTS), True),
        (
            {"content": [{"type": "text", "text": ""}]},
            json.dumps(ARGUMENTS, ensure_ascii=False),
            True,
        ),
        ({}, json.dumps(dict(reversed(ARGUMENTS.items()))), True),
        ({}, json.dumps({**ARGUMENTS, "days": 2.0}), True),
        ({"content": "b"}, json.dumps(ARGUMENTS), False),
        ({}, json.dumps({**ARGUMENTS, "days": True}), False),
        ({}, json.dumps({**ARGUMENTS, "days": "2"}), False),
        ({}, json.dumps({"name": "Rome"}), False),
    ],
)
def test_keys_ignore_only_what_clients_change(
    fields: dict[str, Any], arguments: str, same: bool
) -> None:
    original = keys({"content": ""}, json.dumps(ARGUMENTS))
    changed = keys(fields, arguments)
    assert changed[:2] == original[:2]
    assert (changed[2] == original[2], changed[3] == original[3]) == (same, same)


def test_tool_lists_are_compared_whole() -> None:
    key = key_of_tools([CITY])
    assert key_of_tools([]) != key != key_of_tools([CITY, CITY])


def test_system_message_that_the_template_drops_is_refused() -> None:
    late = [user("a"), {"role": "developer", "content": "b"}]
    play(ask(recorder_of(Policy(["a"])), late))
    with pytest.raises(ApiError) as error:  # this template shows only the first
        play(ask(recorder_of(Policy(["a"]), chat=chat_of("qwen3")), late))
    assert (error.value.status, error.value.param) == (400, "messages[1].role")


def test_hidden_system_message_is_found_with_few_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    note = {"role": "system", "content": "s"}
    opening, renders = CHAT.opening, 0

    def last_only(messages: Messages, *rest: Any, **options: Any) -> list[int]:
        systems = [i for i, message in enumerate(messages) if message["role"] == "system"]
        visible = [one for i, one in enumerate(messages) if i not in systems[:-1]]
        return opening(visible, *rest, **options)

    def counted(*rest: Any, **options: Any) -> list[int]:
        nonlocal renders
        renders += 1
        return opening(*rest, **options)

    monkeypatch.setattr(CHAT, "opening", last_only)
    with pytest.raises(ApiError) as error:
        play(ask(recorder_of(Policy(["a"])), [user("a"), note, user("b"), note, user("c")]))
    assert error.value.param == "messages[1].role"
    monkeypatch.setattr(CHAT, "opening", counted)
    many = [user("a"), *[note] * 200, *[user("b"), note] * 200, user("c")]
    play(ask(recorder_of(Policy(["a"])), many))
    assert renders < 12


AGENTS = {"planner": TOOLS, "critic": []}


def two_agents(*, thinking: bool) -> Finished:
    """Record two concurrent conversations, each with its own system prompt and tools."""

    async def work() -> Finished:
        recorder = recorder_of(Policy(script), thinking=thinking)
        talks = {
            name: [{"role": "system", "content": f"You are the {name}."}, user("Where to?")]
            for name in AGENTS
        }
        for _ in range(4):
            for name, messages in talks.items():
                reply = await ask(recorder, messages, AGENTS[name])
                messages.append(as_sent(reply))
                calls = reply.message.get("tool_calls", ())
                messages += [result(call["id"], "far") for call in calls] or [user("Go on.")]
        return await recorder.finish()

    return play(work())


def rendered(
    finished: Finished, folder: Path, family: str, *, thinking: bool, evaluated: bool = False
) -> list[Segment]:
    """Save a trajectory and return the contexts that `keel sft` would learn."""
    trajectory = Trajectory(
        prompt_id="p",
        sibling=0,
        segments=finished.segments,
        finish_reason=finished.finish_reason,
        messages=(*finished.opening, *finished.messages),
        dialogues=finished.dialogues,
    )
    prompt = Prompt(
        prompt_id="p", domain="d", messages=(user("?"),), environment="e", thinking=thinking
    )
    record = trajectory_record(prompt, trajectory, tokenizer="mine")
    line = {**record, "reward": 1, "parts": {"correct": 1}}
    if evaluated:
        scored = ScoredGroup(
            group=Group(prompt=prompt, trajectories=(trajectory,)),
            rewards_G=np.ones(1, np.float32),
            parts_G=({"correct": 1.0},),
            advantages_G=np.zeros(1, np.float32),
        )
        line = asdict(asked_of("", "s", prompt, [scored], str, str, tokenizer="mine"))
    path = folder / "step_000001.jsonl"
    path.write_text(json.dumps(line) + "\n")
    read = read_trajectories(source(str(path), source="trajectories"), tokenizer="another")
    render = chat_renderer(chat_of(family))
    return [segment for example in read.examples for segment in render(example)]


@pytest.mark.parametrize("thinking", [False, True])
def test_saved_conversations_render_as_sampled(tmp_path: Path, thinking: bool) -> None:
    def contents(segments: Any) -> list[tuple[list[int], list[bool]]]:
        return sorted((s.token_ids_T.tolist(), s.trainable_T.tolist()) for s in segments)

    finished = two_agents(thinking=thinking)
    segments = rendered(finished, tmp_path, "tiny", thinking=thinking)
    assert contents(segments) == contents(finished.segments)


@pytest.mark.parametrize("evaluated", [False, True])
def test_saved_agents_keep_prompts_and_tools(tmp_path: Path, evaluated: bool) -> None:
    segments = rendered(
        two_agents(thinking=False), tmp_path, "qwen3", thinking=False, evaluated=evaluated
    )
    texts = [chat_of("qwen3").decode(segment.token_ids_T.tolist()) for segment in segments]
    found = [("planner" in text, "critic" in text, '"name": "city"' in text) for text in texts]
    assert sorted(found) == [(False, True, False), (True, False, True)]
