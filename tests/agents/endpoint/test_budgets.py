"""What a trajectory may take: turns, tokens, window, seconds."""

from __future__ import annotations

import asyncio

import pytest

from keel.agents.endpoint import record
from keel.agents.endpoint.errors import Refused
from keel.agents.endpoint.types import Finished
from tests.agents.endpoint.kit import (
    CHAT,
    TOOLS,
    Policy,
    as_sent,
    ask,
    check_law,
    play,
    recording,
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
        with pytest.raises(Refused) as refused:
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
        assert sum(isinstance(one, Refused) for one in done) == 1
        return await recorded.finish()

    finished = play(work())
    check_law(policy, finished)
    assert sum(len(s) for _, s in policy.turns) == 12


def test_a_turn_has_a_deadline() -> None:
    policy = Policy(["one"])
    policy.hold = asyncio.Event()

    async def work() -> Finished:
        recorded = recording(policy, turn_s=0.05)
        with pytest.raises(Refused, match=r"within 0\.05 s") as failed:
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
        recorded = recording(policy, deadline_s=1.1)
        late = asyncio.create_task(recorded.overdue(60.0))
        messages = [user("a")]
        for _ in range(2):
            messages += [as_sent(await ask(recorded, messages)), user("b")]
            now += 0.06
        assert await late == "did not end within 1.1 s"
        with pytest.raises(Refused, match=r"1\.1 s is spent") as refused:
            await ask(recorded, messages)
        assert (refused.value.status, refused.value.code) == (403, "time_spent")
        return await recorded.finish()

    finished = play(work())
    assert (finished.finish_reason, finished.usage.turns) == ("deadline", 2)
    assert [round(request.deadline_s, 1) for request in policy.requests] == [1.1, 0.5]
    assert finished.usage.sampling_s == 1.0
    assert finished.usage.tools_s == pytest.approx(0.12)


def test_time_to_the_first_turn_is_its_own() -> None:
    async def work() -> Finished:
        recorded = recording(Policy(["word"]), deadline_s=0.01)
        assert await recorded.overdue(0.05) == "did not ask for a turn within 0.05 s"
        return await recorded.finish()

    assert play(work()).finish_reason == "stop"


def test_a_program_needs_a_deadline() -> None:
    with pytest.raises(ValueError, match="deadline_s must be finite"):
        play(recording(Policy(["word"])).overdue(1.0))


def test_a_turn_that_ran_out_of_time_before_its_first_token_is_none() -> None:
    policy = Policy(["word"])
    policy.silent = True

    async def work() -> Finished:
        recorded = recording(policy, deadline_s=9.0)
        with pytest.raises(Refused, match="9 s is spent"):
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
