"""What a trajectory may take: turns, tokens, window, seconds."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from keel.agents.endpoint import record, requests
from keel.agents.endpoint.errors import ApiError
from keel.agents.endpoint.record import Finished
from keel.agents.endpoint.replies import Reply
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
    recording,
    result,
    user,
)


@pytest.mark.parametrize(
    ("budget", "status", "code", "ended"),
    [
        ({"turns": 2}, 403, "turns_spent", "turns"),
        ({"tokens": 8}, 403, "tokens_spent", "length"),
        ({"window": 60}, 400, "context_length_exceeded", "window"),
    ],
)
def test_a_budget_that_is_spent(budget: dict[str, int], status: int, code: str, ended: str) -> None:
    policy = Policy(["word"])

    async def work() -> Finished:
        recorded = recording(policy, **budget)
        messages = [user("a")]
        with pytest.raises(ApiError) as refused:
            for _ in range(9):
                messages += [as_sent(await ask(recorded, messages)), user("b")]
        assert (refused.value.status, refused.value.code) == (status, code)
        return await recorded.finish()

    finished = play(work())
    check_law(policy, finished)
    assert finished.finish_reason == ended
    for request in policy.requests:
        if "window" in budget:
            assert len(request.token_ids_T) + request.max_tokens <= 60
    assert "tokens" not in budget or sum(len(s) for _, s in policy.turns) == 8


def test_messages_that_cannot_fit_are_refused_before_they_are_tokenised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Policy(["word"])

    async def work() -> Finished:
        recorded = recording(policy)
        reply = await ask(recorded, [user("a")])
        monkeypatch.setattr(CHAT, "extend", None)
        monkeypatch.setattr(CHAT, "opening", None)
        messages = [user("a"), as_sent(reply), user("b" * (8 << 20))]
        with pytest.raises(ApiError, match="your messages resulted in 524291 tokens") as refused:
            await ask(recorded, messages)
        assert refused.value.code == "context_length_exceeded"
        return await recorded.finish()

    assert play(work()).finish_reason == "window"


LONG = "b" * (8 << 20)
CALL = {"id": "c", "function": {"name": "city", "arguments": json.dumps({"name": LONG})}}
TOLD = {"name": "city", "description": LONG}


@pytest.mark.parametrize(
    ("before", "tools"),
    [
        ([], [{"type": "function", "function": TOLD}]),
        ([{"role": "assistant", "tool_calls": [CALL]}, result("c", "far")], TOOLS),
        (
            [
                {
                    "role": "assistant",
                    "reasoning_content": LONG,
                    "tool_calls": [{**CALL, "function": {"name": "city"}}],
                },
                result("c", "far"),
            ],
            TOOLS,
        ),
    ],
    ids=["tools", "calls", "thinking"],
)
def test_whatever_a_template_shows_is_counted_before_it_is_tokenised(
    monkeypatch: pytest.MonkeyPatch, before: Messages, tools: Any
) -> None:
    monkeypatch.setattr(CHAT, "opening", None)

    async def work() -> None:
        recorded = recording(Policy(["word"]))
        with pytest.raises(ApiError) as refused:
            await ask(recorded, [user("a"), *before], tools)
        assert refused.value.code == "context_length_exceeded"

    play(work())


def test_more_messages_and_tools_than_fit_are_refused_before_they_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CHAT, "opening", None)
    monkeypatch.setattr(requests, "arguments_of", None)
    tool = {"type": "function", "function": {"name": "t", "description": "d" * 30}}

    async def work() -> None:
        for messages, tools in (([user("")] * 6001, ()), ([user("a")], [tool] * 1000)):
            with pytest.raises(ApiError) as refused:
                await ask(recording(Policy(["word"])), messages, tools)
            assert refused.value.code == "context_length_exceeded"

    play(work())


def test_thinking_that_a_users_message_has_ended_takes_no_room() -> None:
    async def work() -> None:
        thought = {"role": "assistant", "content": "b", "reasoning_content": LONG}
        reply = await ask(recording(Policy(["word"])), [user("a"), thought, user("c")])
        assert reply.message["content"] == "word"

    play(work())


def test_a_cut_turn_says_so_and_its_calls_are_not_run() -> None:
    policy = Policy(['@city "Rome"\nand more', "done"])

    async def work() -> Finished:
        recorded = recording(policy)
        reply = await ask(recorded, [user("a")], TOOLS, max_tokens=99, max_completion_tokens=15)
        assert (reply.finish_reason, reply.completion_tokens) == ("length", 15)
        assert "tool_calls" not in reply.message
        await ask(recorded, [user("a"), as_sent(reply), user("Go on.")], TOOLS)
        return await recorded.finish()

    finished = play(work())
    check_law(policy, finished)
    assert len(finished.segments) == 1 and policy.requests[0].max_tokens == 15


def test_turns_at_once_share_the_budget() -> None:
    policy = Policy(["word"])
    policy.hold = asyncio.Event()

    async def work() -> Finished:
        recorded = recording(policy, tokens=12, turn_tokens=6)
        tasks = [asyncio.create_task(ask(recorded, [user(f"{i}")])) for i in range(4)]
        while len(policy.requests) < 2:
            await asyncio.sleep(0)
        policy.hold.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(one, ApiError) for one in done) == 1
        return await recorded.finish()

    finished = play(work())
    check_law(policy, finished)
    assert sum(len(s) for _, s in policy.turns) == 12


def test_a_turn_has_a_deadline() -> None:
    policy = Policy(["one"])
    policy.hold = asyncio.Event()

    async def work() -> Finished:
        recorded = recording(policy, turn_s=0.05)
        with pytest.raises(ApiError, match=r"within 0\.05 s") as failed:
            await ask(recorded, [user("a")])
        assert failed.value.status == 503
        return await recorded.finish()

    assert play(work()).segments == ()


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"turn_tokens": -1}, {"turn_s": float("inf")}])
def test_budgets_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        recording(Policy(["word"]), **wrong)


def test_time_between_turns_counts_and_an_engines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5 s of the engine's, and 0.06 of its own: the third turn finds no time left."""
    policy, now = Policy(["word"]), 0.0
    monkeypatch.setattr(record, "monotonic", lambda: now)

    async def work() -> Finished:
        nonlocal now
        recorded = recording(policy, timeout_s=1.1)
        late = asyncio.create_task(recorded.overdue(60.0))
        messages = [user("a")]
        for _ in range(2):
            messages += [as_sent(await ask(recorded, messages)), user("b")]
            now += 0.06
        assert await late == "did not end within 1.1 s"
        with pytest.raises(ApiError, match=r"1\.1 s is spent") as refused:
            await ask(recorded, messages)
        assert (refused.value.status, refused.value.code) == (403, "time_spent")
        return await recorded.finish()

    finished = play(work())
    assert (finished.finish_reason, finished.usage.turns) == ("deadline", 2)
    assert [round(request.timeout_s, 1) for request in policy.requests] == [1.1, 0.5]
    assert finished.usage.sampling_s == 1.0
    assert finished.usage.tools_s == pytest.approx(0.12)


def test_turns_that_are_given_up_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a client that waits for less than a turn takes, and asks again for good."""
    policy, now = Policy(["word"]), 0.0
    monkeypatch.setattr(record, "monotonic", lambda: now)

    async def sample(request: TurnRequest) -> TurnResult:
        policy.requests.append(request)
        return await asyncio.Future[TurnResult]()

    async def work() -> Finished:
        nonlocal now
        recorded = recording(sample, timeout_s=10.0)
        late = asyncio.create_task(recorded.overdue(60.0))
        for n, left in enumerate((10.0, 7.0, 4.0, 1.0)):
            task = asyncio.create_task(ask(recorded, [user("a")]))
            while len(policy.requests) <= n:
                await asyncio.sleep(0)
            assert policy.requests[n].timeout_s == left
            now += 3.0
            task.cancel()
            await asyncio.wait({task})
        assert await late == "did not end within 10 s"
        with pytest.raises(ApiError, match="10 s is spent"):
            await ask(recorded, [user("a")])
        return await recorded.finish()

    finished = play(work())
    assert (finished.finish_reason, finished.usage.turns) == ("deadline", 0)
    assert finished.counts.given_up == 4
    assert finished.usage.sampling_s == 12.0


def test_time_to_the_first_turn_is_its_own() -> None:
    async def work() -> Finished:
        recorded = recording(Policy(["word"]), timeout_s=0.01)
        assert await recorded.overdue(0.05) == "did not ask for a turn within 0.05 s"
        return await recorded.finish()

    assert play(work()).finish_reason == "stop"


def test_a_program_needs_a_deadline() -> None:
    with pytest.raises(ValueError, match="timeout_s must be finite"):
        play(recording(Policy(["word"])).overdue(1.0))


def test_a_turn_that_ran_out_of_time_before_its_first_token_is_none() -> None:
    policy = Policy(["word"])
    policy.silent = True

    async def work() -> Finished:
        recorded = recording(policy, timeout_s=9.0)
        with pytest.raises(ApiError, match="9 s is spent"):
            await ask(recorded, [user("a")])
        return await recorded.finish()

    finished = play(work())
    assert finished.segments == () and finished.finish_reason == "deadline"


def test_cached_tokens_are_of_what_this_trajectory_had_computed() -> None:
    """A sibling's opening is cached, too, and is no turn repeated."""
    policy = Policy(["word"])

    async def work() -> Finished:
        recorded = recording(policy)
        await ask(recorded, [user("a")])
        return await recorded.finish()

    assert play(work()).usage.cached_tokens == 0


def test_a_turn_ends_where_the_chat_format_says_so() -> None:
    policy = Policy(["word"])
    play(ask(recording(policy), [user("a")]))
    assert policy.requests[0].stop_ids == CHAT.stop_ids != ()


@dataclass
class Held:
    """A policy whose turns wait, one of each conversation that is named here."""

    policy: Policy = field(default_factory=lambda: Policy(["word"]))
    waiting: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])

    async def __call__(self, request: TurnRequest) -> TurnResult:
        asked = CHAT.decode(request.token_ids_T.tolist())
        for name in list(self.waiting):
            if f"I am {name}." in asked:
                await self.waiting.pop(name).wait()
        return await self.policy(request)


def ended(*happens: str, window: int = BUDGET.window) -> str:
    """The finish reason after requests that `happens` names by the conversation: `a` is a whole
    one, `a<` begins and `a>` ends one, `a!` is cut after two tokens, as its client wants it, and
    `a^` is too long; `a+` begins the same anew."""
    held = Held()
    messages: dict[str, list[dict[str, Any]]] = {}
    tasks: dict[str, tuple[asyncio.Task[Reply], asyncio.Event]] = {}

    async def work() -> Finished:
        recorded = recording(held, window=window)

        def begin(name: str, what: str) -> asyncio.Task[Reply]:
            so_far = messages.setdefault(name, [user(f"I am {name}.")])
            if what == "^":
                so_far = [*so_far[:-1], user("long " * window)]
            limits = {"max_tokens": 2} if what == "!" else {}
            return asyncio.create_task(ask(recorded, so_far, **limits))

        async def end(name: str, task: asyncio.Task[Reply]) -> None:
            try:
                messages[name] += [as_sent(await task), user("Go on.")]
            except ApiError as refused:
                assert refused.code == "context_length_exceeded"

        for what in happens:
            name, how = what[0], what[1:].removeprefix("+")
            if what[1:] != how:
                del messages[name]
            if how == ">":
                task, may_end = tasks.pop(name)
                may_end.set()
                await end(name, task)
            elif how.endswith("<"):
                held.waiting[name] = may_end = asyncio.Event()
                tasks[name] = begin(name, how[0]), may_end
                while name in held.waiting:
                    await asyncio.sleep(0)
            else:
                await end(name, begin(name, how))
        return await recorded.finish()

    finished = play(work())
    check_law(held.policy, finished)
    return finished.finish_reason


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        # One after the other: the last one says how it ended.
        (("a!", "a"), "stop"),
        (("a", "a!"), "length"),
        (("a^", "b"), "stop"),  # it has begun anew with a shorter context
        (("a", "b!", "a"), "stop"),  # a sub-agent that was cut, and its caller went on
        (("a", "b", "c!", "a"), "stop"),
        (("a", "b!"), "length"),
        # Two at once: the one that was cut was, whichever is over last.
        (("a!<", "b<", "a>", "b>"), "length"),
        (("a!<", "b<", "b>", "a>"), "length"),
        (("a", "b", "a^", "b"), "window"),
        (("a<", "b^", "a>", "a"), "window"),
        (("a!<", "b<", "a>", "c<", "b>", "c>"), "length"),  # the next of many, and not after it
        # … until their caller goes on after both.
        (("m", "a!<", "b<", "a>", "b>", "m"), "stop"),
        (("m", "a!<", "b<", "a>", "b>", "m!"), "length"),
        # A title, beside the conversation that it is of, or begun before that goes on.
        (("m<", "t!", "m>"), "stop"),
        (("m<", "t!", "m>", "m", "m"), "stop"),
        (("m", "t!<", "m<", "t>", "m>"), "length"),
        (("m", "t!<", "m<", "t>", "m>", "m"), "stop"),
        (("m<", "t!", "m>", "m!"), "length"),
        # A sub-agent that is asked the same twice, and cut the second time.
        (("a", "m", "b", "m", "b+!", "m"), "stop"),
        (("a", "m", "b", "m", "b+!"), "length"),
        # The same question twice at once.
        (("a!<", "a", "a>"), "length"),
    ],
)
def test_how_conversations_at_once_end(happens: tuple[str, ...], reason: str) -> None:
    assert ended(*happens, window=400) == reason
