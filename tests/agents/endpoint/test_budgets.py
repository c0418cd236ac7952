"""Limits of a trajectory: turns, tokens, window, seconds; and how it ends."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from keel.agents.endpoint import recorder as recorder_module
from keel.agents.endpoint import requests
from keel.agents.endpoint.recorder import Finished
from keel.agents.endpoint.replies import Reply
from keel.agents.endpoint.requests import ApiError
from keel.rl.turns import TurnRequest, TurnResult
from tests.agents.endpoint.kit import (
    BUDGET,
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
    user,
)


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

    async def work() -> Finished:
        recorder = recorder_of(policy, **budget)
        messages = [user("a")]
        with pytest.raises(ApiError) as error:
            for _ in range(9):
                messages += [as_sent(await ask(recorder, messages)), user("b")]
        assert (error.value.status, error.value.code) == (status, code)
        return await recorder.finish()

    finished = play(work())
    check_law(policy, finished)
    assert finished.finish_reason == reason
    if "window" in budget:
        assert all(len(r.token_ids_T) + r.max_tokens <= 60 for r in policy.requests)
    assert "tokens" not in budget or sum(len(s) for _, s in policy.turns) == 8


LONG = "b" * (8 << 20)
CALL = {"id": "c", "function": {"name": "city", "arguments": json.dumps({"name": LONG})}}
THOUGHT = {
    "role": "assistant",
    "reasoning_content": LONG,
    "tool_calls": [{**CALL, "function": {"name": "city"}}],
}


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([user(LONG)], ()),
        (
            [user("a")],
            [{"type": "function", "function": {"name": "city", "description": LONG}}],
        ),
        ([user("a"), {"role": "assistant", "tool_calls": [CALL]}, result("c", "far")], TOOLS),
        ([user("a"), THOUGHT, result("c", "far")], TOOLS),
        ([user("")] * 6001, ()),
        (
            [user("a")],
            [{"type": "function", "function": {"name": "t", "description": "d" * 30}}] * 1000,
        ),
    ],
    ids=["content", "tools", "calls", "thinking", "many messages", "many tools"],
)
def test_oversized_request_is_refused_before_tokenization(
    monkeypatch: pytest.MonkeyPatch, messages: Messages, tools: Any
) -> None:
    monkeypatch.setattr(CHAT, "opening", None)
    monkeypatch.setattr(requests, "arguments_of", None)

    async def work() -> Finished:
        recorder = recorder_of(Policy(["word"]))
        with pytest.raises(ApiError) as error:
            await ask(recorder, messages, tools)
        assert error.value.code == "context_length_exceeded"
        return await recorder.finish()

    assert play(work()).finish_reason == "window"


def test_thinking_before_a_user_message_is_not_counted() -> None:
    thought = {"role": "assistant", "content": "b", "reasoning_content": LONG}
    reply = play(ask(recorder_of(Policy(["word"])), [user("a"), thought, user("c")]))
    assert reply.message["content"] == "word"


def test_calls_of_a_cut_turn_are_withheld() -> None:
    policy = Policy(['@city "Rome"\nand more', "done"])

    async def work() -> Finished:
        recorder = recorder_of(policy)
        reply = await ask(recorder, [user("a")], TOOLS, max_tokens=99, max_completion_tokens=15)
        assert (reply.finish_reason, reply.completion_tokens) == ("length", 15)
        assert "tool_calls" not in reply.message
        await ask(recorder, [user("a"), as_sent(reply), user("Go on.")], TOOLS)
        return await recorder.finish()

    finished = play(work())
    check_law(policy, finished)
    assert len(finished.segments) == 1 and policy.requests[0].max_tokens == 15


def test_concurrent_turns_share_the_budget() -> None:
    policy = Policy(["word"])
    policy.hold = asyncio.Event()

    async def work() -> Finished:
        recorder = recorder_of(policy, tokens=12, turn_tokens=6)
        tasks = [asyncio.create_task(ask(recorder, [user(f"{i}")])) for i in range(4)]
        while len(policy.requests) < 2:
            await asyncio.sleep(0)
        policy.hold.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(one, ApiError) for one in outcomes) == 1
        return await recorder.finish()

    finished = play(work())
    check_law(policy, finished)
    assert sum(len(s) for _, s in policy.turns) == 12


def test_slow_turn_gets_503() -> None:
    policy = Policy(["one"])
    policy.hold = asyncio.Event()

    async def work() -> Finished:
        recorder = recorder_of(policy, turn_s=0.05)
        with pytest.raises(ApiError) as error:
            await ask(recorder, [user("a")])
        assert error.value.status == 503
        return await recorder.finish()

    assert play(work()).segments == ()


@pytest.mark.parametrize("budget", [{"tokens": 0}, {"turn_tokens": -1}, {"turn_s": float("inf")}])
def test_invalid_budget_is_refused(budget: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(budget))):
        recorder_of(Policy(["word"]), **budget)


def test_engine_and_idle_time_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn takes 0.5 s of the engine and 0.06 s of the program: the third has no time."""
    policy, now = Policy(["word"]), 0.0
    monkeypatch.setattr(recorder_module, "monotonic", lambda: now)

    async def work() -> Finished:
        nonlocal now
        recorder = recorder_of(policy, timeout_s=1.1)
        late = asyncio.create_task(recorder.overdue(60.0))
        messages = [user("a")]
        for _ in range(2):
            messages += [as_sent(await ask(recorder, messages)), user("b")]
            now += 0.06
        assert "1.1 s" in await late
        with pytest.raises(ApiError) as error:
            await ask(recorder, messages)
        assert (error.value.status, error.value.code) == (403, "time_spent")
        return await recorder.finish()

    finished = play(work())
    assert (finished.finish_reason, finished.usage.turns) == ("deadline", 2)
    assert [round(request.timeout_s, 1) for request in policy.requests] == [1.1, 0.5]
    assert finished.usage.sampling_s == 1.0
    assert finished.usage.tools_s == pytest.approx(0.12)


def test_cancelled_turns_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that always disconnects too early still meets its deadline."""
    policy, now = Policy(["word"]), 0.0
    monkeypatch.setattr(recorder_module, "monotonic", lambda: now)

    async def sample(request: TurnRequest) -> TurnResult:
        policy.requests.append(request)
        return await asyncio.Future[TurnResult]()

    async def work() -> Finished:
        nonlocal now
        recorder = recorder_of(sample, timeout_s=10.0)
        late = asyncio.create_task(recorder.overdue(60.0))
        for n, remaining in enumerate((10.0, 7.0, 4.0, 1.0)):
            task = asyncio.create_task(ask(recorder, [user("a")]))
            while len(policy.requests) <= n:
                await asyncio.sleep(0)
            assert policy.requests[n].timeout_s == remaining
            now += 3.0
            task.cancel()
            await asyncio.wait({task})
        assert "10 s" in await late
        with pytest.raises(ApiError):
            await ask(recorder, [user("a")])
        return await recorder.finish()

    finished = play(work())
    assert (finished.finish_reason, finished.usage.turns) == ("deadline", 0)
    assert finished.counts.cancelled == 4
    assert finished.usage.sampling_s == 12.0


def test_first_request_has_its_own_deadline() -> None:
    async def work() -> Finished:
        recorder = recorder_of(Policy(["word"]), timeout_s=0.01)
        assert "0.05 s" in await recorder.overdue(0.05)
        return await recorder.finish()

    assert play(work()).finish_reason == "stop"
    with pytest.raises(ValueError, match="timeout_s"):
        play(recorder_of(Policy(["word"])).overdue(1.0))


def test_turn_without_tokens_is_no_turn() -> None:
    policy = Policy(["word"])
    policy.silent = True

    async def work() -> Finished:
        recorder = recorder_of(policy, timeout_s=9.0)
        with pytest.raises(ApiError) as error:
            await ask(recorder, [user("a")])
        assert error.value.code == "time_spent"
        return await recorder.finish()

    finished = play(work())
    assert finished.segments == () and finished.finish_reason == "deadline"


def test_first_turn_has_stop_ids_and_no_cached_tokens() -> None:
    policy = Policy(["word"])

    async def work() -> Finished:
        recorder = recorder_of(policy)
        await ask(recorder, [user("a")])
        return await recorder.finish()

    assert play(work()).usage.cached_tokens == 0, "a sibling's opening is no repeated turn"
    assert policy.requests[0].stop_ids == CHAT.stop_ids != ()


@dataclass
class Held:
    """A policy that holds one turn of each conversation named in `waiting`."""

    policy: Policy = field(default_factory=lambda: Policy(["word"]))
    waiting: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])

    async def __call__(self, request: TurnRequest) -> TurnResult:
        context = CHAT.decode(request.token_ids_T.tolist())
        for name in list(self.waiting):
            if f"I am {name}." in context:
                await self.waiting.pop(name).wait()
        return await self.policy(request)


def ending(*events: str, window: int = BUDGET.window) -> str:
    """Return the finish reason after a sequence of events, named by conversation: `a` is a whole
    request, `a<` starts and `a>` ends one, `a!` is cut by its client after two tokens, `a^` is too
    long; `a+` restarts the conversation."""
    held = Held()
    messages: dict[str, list[dict[str, Any]]] = {}
    tasks: dict[str, tuple[asyncio.Task[Reply], asyncio.Event]] = {}

    async def work() -> Finished:
        recorder = recorder_of(held, window=window)

        def begin(name: str, kind: str) -> asyncio.Task[Reply]:
            history = messages.setdefault(name, [user(f"I am {name}.")])
            if kind == "^":
                history = [*history[:-1], user("long " * window)]
            limits = {"max_tokens": 2} if kind == "!" else {}
            return asyncio.create_task(ask(recorder, history, **limits))

        async def end(name: str, task: asyncio.Task[Reply]) -> None:
            try:
                messages[name] += [as_sent(await task), user("Go on.")]
            except ApiError as error:
                assert error.code == "context_length_exceeded"

        for event in events:
            name, kind = event[0], event[1:].removeprefix("+")
            if event[1:] != kind:
                del messages[name]
            if kind == ">":
                task, may_end = tasks.pop(name)
                may_end.set()
                await end(name, task)
            elif kind.endswith("<"):
                held.waiting[name] = may_end = asyncio.Event()
                tasks[name] = begin(name, kind[0]), may_end
                while name in held.waiting:
                    await asyncio.sleep(0)
            else:
                await end(name, begin(name, kind))
        return await recorder.finish()

    finished = play(work())
    check_law(held.policy, finished)
    return finished.finish_reason


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        # In sequence, the last one decides.
        (("a!", "a"), "stop"),
        (("a", "a!"), "length"),
        (("a^", "b"), "stop"),  # restarted with a shorter context
        (("a", "b!", "a"), "stop"),  # a sub-agent was cut, and its caller continued
        (("a", "b", "c!", "a"), "stop"),
        (("a", "b!"), "length"),
        # Of two concurrent ones, the cut one decides, whichever ends last.
        (("a!<", "b<", "a>", "b>"), "length"),
        (("a!<", "b<", "b>", "a>"), "length"),
        (("a", "b", "a^", "b"), "window"),
        (("a<", "b^", "a>", "a"), "window"),
        (("a!<", "b<", "a>", "c<", "b>", "c>"), "length"),
        # … until their caller continues after both.
        (("m", "a!<", "b<", "a>", "b>", "m"), "stop"),
        (("m", "a!<", "b<", "a>", "b>", "m!"), "length"),
        # A title, concurrent with its conversation or before that continues.
        (("m<", "t!", "m>"), "stop"),
        (("m<", "t!", "m>", "m", "m"), "stop"),
        (("m", "t!<", "m<", "t>", "m>"), "length"),
        (("m", "t!<", "m<", "t>", "m>", "m"), "stop"),
        (("m<", "t!", "m>", "m!"), "length"),
        # A sub-agent gets the same task twice and is cut the second time.
        (("a", "m", "b", "m", "b+!", "m"), "stop"),
        (("a", "m", "b", "m", "b+!"), "length"),
        # The same request twice at once.
        (("a!<", "a", "a>"), "length"),
    ],
)
def test_finish_reason_of_concurrent_conversations(events: tuple[str, ...], reason: str) -> None:
    assert ending(*events, window=400) == reason
