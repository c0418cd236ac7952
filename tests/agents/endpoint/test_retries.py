"""Requests that are asked again: what was lost is given, what failed is sampled anew."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import openai
import pytest
from aiohttp import web

from keel.agents.endpoint import server
from keel.agents.endpoint.errors import ApiError
from keel.agents.endpoint.record import Finished
from keel.rl.turns import TurnRequest, TurnResult
from tests.agents.endpoint.kit import (
    Policy,
    as_sent,
    ask,
    check_law,
    play,
    recording,
    served,
    user,
)
from tests.agents.episodes import run


def test_an_answer_that_was_lost_is_given_again_and_one_that_came_is_not() -> None:
    policy = Policy(["one", "two", "three"])

    async def work() -> Finished:
        recorded = recording(policy)
        first = await ask(recorded, [user("a")])
        assert await ask(recorded, [user("a")], is_retry=True) is first
        second = await ask(recorded, [user("a")])  # it has the first, and wants another
        assert second.message["content"] == "two"
        recorded.lose(second)
        assert await ask(recorded, [user("a")]) is second
        assert (await ask(recorded, [user("a")])).message["content"] == "three"
        return await recorded.finish()

    finished = play(work())
    check_law(policy, finished)
    assert (finished.counts.repeated, finished.usage.turns) == (2, 3)
    assert len({request.seed for request in policy.requests}) == 3


def test_a_retry_of_a_try_that_failed_gets_no_answer_of_another() -> None:
    """Several at once ask the same: one of them fails, and its client's library tries again."""
    policy = Policy(["one", "two"])

    async def first_fails(request: TurnRequest) -> TurnResult:
        if policy.requests:
            return await policy(request)
        policy.requests.append(request)
        while len(policy.requests) < 2:
            await asyncio.sleep(0)
        raise RuntimeError("engine 3 died")

    async def work() -> Finished:
        recorded = recording(first_fails)
        both = (ask(recorded, [user("a")]) for _ in range(2))
        failed, _ = await asyncio.gather(*both, return_exceptions=True)
        assert isinstance(failed, ApiError) and "engine 3 died" in failed.message
        again = await ask(recorded, [user("a")], is_retry=True)
        assert again.message["content"] == "two"
        return await recorded.finish()

    check_law(policy, play(work()))
    first, other, again = (request.seed for request in policy.requests)
    assert again == first != other


def test_a_turn_that_failed_or_was_given_up_leaves_nothing_and_is_asked_for_again() -> None:
    policy = Policy(["one", "two"])

    async def work() -> Finished:
        recorded = recording(policy)
        messages = [user("a")]
        messages += [as_sent(await ask(recorded, messages)), user("b")]
        policy.fail = RuntimeError("engine 3 died")
        with pytest.raises(ApiError, match="engine 3 died") as failed:
            await ask(recorded, messages)
        assert failed.value.status == 503
        policy.fail, policy.hold = None, asyncio.Event()
        task = asyncio.create_task(ask(recorded, messages))
        while len(policy.requests) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        policy.hold = None
        await ask(recorded, messages, is_retry=True)
        return await recorded.finish()

    finished = play(work())
    check_law(policy, finished)
    assert len(finished.segments) == 1
    assert len({request.seed for request in policy.requests[1:]}) == 1
    assert (finished.counts.failed, finished.counts.given_up, finished.usage.turns) == (1, 1, 2)
    assert "engine 3 died" in finished.failure


def test_a_retry_gets_the_answer_that_was_lost_before_one_that_came() -> None:
    policy = Policy(["one", "two"])

    async def work() -> Finished:
        recorded = recording(policy)
        asked = [await ask(recorded, [user("a")]) for _ in range(2)]
        recorded.lose(asked[1])
        assert await ask(recorded, [user("a")], is_retry=True) is asked[1]
        return await recorded.finish()

    assert play(work()).counts.repeated == 1


@pytest.mark.parametrize("error", [ConnectionResetError, TimeoutError])
def test_an_answer_that_is_not_taken_is_lost_and_nobodys_error(
    monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord], error: type[Exception]
) -> None:
    policy, answered = Policy(["one"]), server._answer

    async def fails(request: web.Request, *told: Any) -> web.StreamResponse:
        await web.StreamResponse().prepare(request)  # a part of it was written
        raise error

    async def work() -> str | None:
        async with served(recording(policy)) as (_, _, client):
            monkeypatch.setattr(server, "_answer", fails)
            asked = partial(client.chat.completions.create, model="m", messages=[user("a")])
            with pytest.raises(openai.APIConnectionError):
                await asked()
            monkeypatch.setattr(server, "_answer", answered)
            return (await asked()).choices[0].message.content

    assert run(work()) == "one"
    assert len(policy.requests) == 1
    assert not [record for record in logged if record.levelno >= logging.ERROR]
