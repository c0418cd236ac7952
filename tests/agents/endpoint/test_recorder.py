"""Requests become turns within a budget; each sampled token is trained once."""

import asyncio
import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.agents.endpoint import recorder as recorder_module
from keel.agents.endpoint.recorder import TrajectoryRecorder, _prefix_keys
from keel.agents.endpoint.requests import ApiError, read_request
from keel.data.conversations.load import read_conversations
from keel.rl.records import trajectory_record
from keel.rl.types import PROGRAM, Prompt, Trajectory
from keel.trainer.prepare import _chat_renderer
from tests.agents.endpoint.kit import (
    CHAT,
    TOOLS,
    Messages,
    Policy,
    as_sent,
    ask,
    record,
    result,
    script,
    user,
)
from tests.data.conversations.sources import source
from tests.rollout.chat.families import chat_of

OTHER = [{"type": "function", "function": {"name": "hotel", "description": "Books."}}]


def hermes(context: str, turn: int) -> str:
    """Like `script`, in a format whose tokens depend on their neighbors."""
    body = '{"name": "city", "arguments": {"name": "R\u00f4me", "days": 3.0}}'
    call = f"\n<tool_call>\n{body}\n</tool_call>"
    thinks = "<think>" in context and "<think>\n\n</think>" not in context[-24:]
    thought = f"<think>\nhm {turn}\n</think>\n\n" if thinks or turn % 2 else ""
    return f"{thought}turn {turn}{call * (turn % 3)}"


async def take_turn(
    recorder: TrajectoryRecorder, messages: Messages, tools: Any = TOOLS, text: str = "far"
) -> None:
    reply = await ask(recorder, messages, tools)
    messages.append(as_sent(reply))
    calls = reply.message.get("tool_calls", ())
    messages += [result(call["id"], text) for call in calls] or [user("Go on.")]


def test_twelve_turns_form_one_segment() -> None:
    policy = Policy(script)

    async def work(recorder: TrajectoryRecorder) -> None:
        messages = [{"role": "system", "content": "Be brief."}, user("Where to?")]
        for _ in range(12):
            await take_turn(recorder, messages, text="it is <|im_end|> done")

    finished = record(policy, work)
    (segment,) = finished.segments
    text = CHAT.decode(segment.token_ids_T.tolist())
    assert " <|im_end|> done" not in text, "a control text in a tool result must stay text"
    assert text.count("<|im_start|>assistant") == 12 == finished.usage.turns
    assert (finished.usage.calls, finished.usage.failed_calls) == (12, 0)
    assert (finished.usage.contexts_extended, finished.usage.contexts_rendered) == (11, 1)
    roles = [message["role"] for message in (*finished.index.opening, *finished.index.messages)]
    assert roles[:6] == ["system", "user", "assistant", "user", "assistant", "tool"]


def test_calls_in_thinking_continue_the_segment() -> None:
    policy = Policy(['<think>\nhm\n@city "Rome"', 'more\n@city "Oslo"', "so\n</think>\n\nDone."])
    messages = [user("Where to?")]

    async def work(recorder: TrajectoryRecorder) -> None:
        for _ in range(3):
            await take_turn(recorder, messages)

    chat = chat_of("tiny", tools_in_thinking=True)
    finished = record(policy, work, chat=chat, thinking=True)
    assert len(finished.segments) == 1 and messages[-2]["content"] == "Done."
    assert (finished.usage.calls, finished.usage.malformed_calls) == (2, 0)


def test_render_restores_thinking_that_the_client_dropped() -> None:
    async def work(recorder: TrajectoryRecorder) -> None:
        messages = [user("Where to?")]
        await take_turn(recorder, messages)
        await ask(recorder, messages, [*TOOLS, *OTHER])

    policy = Policy(['<think>\nplan\n</think>\n\n@city "Rome"', "done"])
    finished = record(policy, work, thinking=True)
    assert "plan" in CHAT.decode(finished.segments[1].token_ids_T.tolist())


def test_changed_tools_or_messages_fork() -> None:
    async def work(recorder: TrajectoryRecorder) -> None:
        turn = as_sent(await ask(recorder, [user("a")], TOOLS))
        await ask(recorder, [user("a"), turn, user("b")], OTHER)
        await ask(recorder, [user("a"), {**turn, "content": "One."}, user("b")], TOOLS)
        await ask(recorder, [user("a"), {**turn, "content": "\none "}, user("b")], TOOLS)

    finished = record(Policy(["one", "two", "three", "four"]), work)
    assert (finished.usage.contexts_rendered, finished.usage.contexts_extended) == (3, 1)
    assert [int(s.trainable_T.sum()) for s in finished.segments] == [3 + 1 + 4 + 1, 4, 6]
    tools = [dialogue.tools[0]["function"]["name"] for dialogue in finished.index.dialogues]
    assert tools == ["city", "hotel", "city"]


def test_assistant_messages_of_the_program_are_marked() -> None:
    async def work(recorder: TrajectoryRecorder) -> None:
        turn = as_sent(await ask(recorder, [user("a")]))
        invented = {"role": "assistant", "content": "made up"}
        await ask(recorder, [user("a"), turn, user("b"), invented, user("c")])

    messages = record(Policy(["one", "two"]), work).index.messages
    assert [(m["content"], m.get("name")) for m in messages] == [
        *(("one", None), ("b", None), ("made up", PROGRAM), ("c", None), ("two", None))
    ]


def mangled(message: dict[str, Any], how: str) -> dict[str, Any]:
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
@given(steps=st.lists(STEP, min_size=1, max_size=9), thinking=st.booleans())
def test_every_sampled_token_is_trained_exactly_once(
    family: str, steps: list[Any], thinking: bool
) -> None:
    async def advance(recorder: TrajectoryRecorder, talk: dict[str, Any], how: str) -> None:
        messages = [mangled(message, how) for message in talk["messages"]]
        reply = await ask(recorder, messages, talk["tools"])
        calls = reply.message.get("tool_calls", ())
        talk["messages"] = [
            *talk["messages"],
            as_sent(reply),
            *[result(call["id"], "<think>7") for call in reversed(calls)],
            *([] if calls else [user("On.")]),
        ]

    async def work(recorder: TrajectoryRecorder) -> None:
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
            pending.append(asyncio.create_task(advance(recorder, talk, how)))
        await asyncio.gather(*pending)

    policy = Policy(script if family == "tiny" else hermes, family)
    finished = record(policy, work, thinking=thinking, chat=chat_of(family))
    assert finished.usage.turns == len(steps)


def test_failed_and_cancelled_turns_are_resampled_alike() -> None:
    policy = Policy(["one", "two"])

    async def work(recorder: TrajectoryRecorder) -> None:
        messages = [user("a")]
        await take_turn(recorder, messages, ())
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
        await ask(recorder, messages)

    finished = record(policy, work)
    assert len(finished.segments) == 1
    assert len({request.seed for request in policy.requests[1:]}) == 1
    assert finished.last_failure and finished.usage.turns == 2
    assert "engine 3 died" in finished.last_failure


def test_keys_ignore_only_what_clients_change() -> None:
    arguments = {"name": "Rome \u00e9", "days": 2}

    def key(fields: dict[str, Any], **changes: Any) -> str:
        function = {"name": "city", "arguments": json.dumps({**arguments, **changes}, indent=1)}
        call = {"id": "c", "type": "function", "function": function}
        turn = {"role": "assistant", "tool_calls": [call], **fields}
        request = read_request({"messages": [user("a"), turn, result("c", "b")]})
        return _prefix_keys(request.messages)[-1]

    same = [
        *({"content": None, "refusal": None}, {"content": [], "reasoning_content": "more"}),
        *({"content": "\n \n"}, {"content": [{"type": "text", "text": ""}]}),
    ]
    assert {key(fields) for fields in same} == {key({}), key({}, days=2.0)}
    assert len({key({}), key({"content": "b"}), key({}, days=True), key({}, days="2")}) == 4


@pytest.mark.parametrize("thinking", [False, True])
def test_saved_conversations_render_as_sampled(tmp_path: Path, thinking: bool) -> None:

    async def work(recorder: TrajectoryRecorder) -> None:
        talks = [
            ([{"role": "system", "content": f"You are the {name}."}, user("Where to?")], tools)
            for name, tools in (("planner", TOOLS), ("critic", []))
        ]
        for _ in range(4):
            for messages, tools in talks:
                await take_turn(recorder, messages, tools)

    finished = record(Policy(script), work, thinking=thinking)
    trajectory = Trajectory(
        prompt_id="p",
        sibling=0,
        segments=finished.segments,
        finish_reason="stop",
        messages=(*finished.index.opening, *finished.index.messages),
        dialogues=finished.index.dialogues,
    )
    prompt = Prompt(prompt_id="p", domain="d", messages=(user("?"),), thinking=thinking)
    line = trajectory_record(prompt, trajectory, tokenizer="mine")
    path = tmp_path / "step_000001.jsonl"
    path.write_text(json.dumps({**line, "reward": 1, "parts": {"correct": 1}}) + "\n")
    read = read_conversations(source(str(path), source="trajectories"), tokenizer="another")
    render = _chat_renderer(CHAT)

    def contents(segments: Any) -> list[tuple[list[int], list[bool]]]:
        return sorted((s.token_ids_T.tolist(), s.trainable_T.tolist()) for s in segments)

    rendered = [segment for example in read.examples for segment in render(example)]
    assert contents(rendered) == contents(finished.segments)


@pytest.mark.parametrize(
    ("budget", "status", "code", "reason"),
    [
        ({"turns": 2}, 403, "turns_spent", "turns"),
        ({"tokens": 8}, 403, "tokens_spent", "length"),
        ({"window": 60}, 400, "context_length_exceeded", "window"),
    ],
)
def test_spent_budget_ends_the_trajectory(
    budget: dict[str, int], status: int, code: str, reason: str
) -> None:
    policy = Policy(["word"])

    async def work(recorder: TrajectoryRecorder) -> None:
        messages = [user("a")]
        with pytest.raises(ApiError) as error:
            for _ in range(9):
                messages += [as_sent(await ask(recorder, messages)), user("b")]
        assert (error.value.status, error.value.code) == (status, code)

    assert record(policy, work, **budget).finish_reason == reason
    assert "tokens" not in budget or sum(len(s) for _, s in policy.turns) == 8


LONG = "b" * (1 << 20)
CALL = {"id": "c", "function": {"name": "city", "arguments": json.dumps({"name": LONG})}}


def test_oversized_request_is_refused_before_tokenization(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHAT, "opening", None)
    monkeypatch.setattr(recorder_module, "ArgumentValidator", None)
    called = [user("a"), {"role": "assistant", "tool_calls": [CALL]}, result("c", "far")]

    async def work(recorder: TrajectoryRecorder) -> None:
        for messages, tools in (([user(LONG)], ()), (called, TOOLS), ([user("")] * 6001, ())):
            with pytest.raises(ApiError) as error:
                await ask(recorder, messages, tools)
            assert error.value.code == "context_length_exceeded"

    assert record(Policy(["word"]), work).finish_reason == "window"


def test_large_schemas_do_not_stall_other_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    validator, threads = recorder_module.ArgumentValidator, list[threading.Thread]()

    def validator_of(tools: Any) -> Any:
        threads.append(threading.current_thread())
        return validator(tools)

    monkeypatch.setattr(recorder_module, "ArgumentValidator", validator_of)

    async def work(recorder: TrajectoryRecorder) -> None:
        await ask(recorder, [user("a")], TOOLS)
        await ask(recorder, [user("b")], TOOLS)
        assert len(threads) == 1 and threading.current_thread() not in threads

    record(Policy(["word", "word"]), work)


def test_calls_of_a_cut_turn_are_withheld() -> None:
    policy = Policy(['@city "Rome"\nand more', "done"])

    async def work(recorder: TrajectoryRecorder) -> None:
        reply = await ask(recorder, [user("a")], TOOLS, max_tokens=99, max_completion_tokens=15)
        assert (reply.finish_reason, reply.completion_tokens) == ("length", 15)
        assert "tool_calls" not in reply.message
        await ask(recorder, [user("a"), as_sent(reply), user("Go on.")], TOOLS)

    assert len(record(policy, work).segments) == 1 and policy.requests[0].max_tokens == 15


def test_engine_and_idle_time_count(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, now = Policy(["word"]), 0.0
    monkeypatch.setattr(recorder_module, "monotonic", lambda: now)

    async def work(recorder: TrajectoryRecorder) -> None:
        nonlocal now
        late = asyncio.create_task(recorder.overdue(60.0))
        messages = [user("a")]
        for _ in range(2):
            messages += [as_sent(await ask(recorder, messages)), user("b")]
            now += 0.06
        assert "1.1 s" in await late
        with pytest.raises(ApiError) as error:
            await ask(recorder, messages)
        assert (error.value.status, error.value.code) == (403, "time_spent")

    finished = record(policy, work, timeout_s=1.1)
    assert (finished.finish_reason, finished.usage.turns) == ("deadline", 2)
    assert [round(request.timeout_s, 1) for request in policy.requests] == [1.1, 0.5]
    assert finished.usage.sampling_s == 1.0
    assert finished.usage.tools_s == pytest.approx(0.12)
