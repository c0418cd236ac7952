"""What a trajectory may take: turns, tokens, window, seconds."""

from __future__ import annotations

import asyncio

import pytest

from keel.agents.endpoint.errors import Refused
from keel.agents.endpoint.types import Budgets, Finished
from tests.agents.endpoint.kit import TOOLS, Policy, as_sent, ask, check_law, play, recording, user


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
        Budgets(**{"window": 9, "tokens": 9, "turns": 9, **wrong})  # type: ignore[arg-type]
