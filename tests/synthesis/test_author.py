"""Requests, replies and cost limits of an author behind an endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from keel.configs.synthesis import AuthorConfig, CostConfig
from keel.rl.turns import Malformed, ToolCall, ToolSpec
from keel.synthesis.author import (
    AuthorLost,
    AuthorReply,
    BudgetSpent,
    CallUsage,
    EndpointAuthor,
    SynthesisBudget,
)
from tests.rewards.judge.judge_server import Reply, Server, running
from tests.synthesis.authors import completion
from tests.waiting import PATIENCE_S

LOOK = ToolSpec(
    name="look", description="", parameters={"type": "object", "properties": {}, "required": []}
)
ASK = ({"role": "user", "content": "Write a task."},)


def words(text: str, **usage: int) -> Reply:
    return completion({"role": "assistant", "content": text}, "stop", **usage)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Server]:
    with running(lambda _: words("")) as server:
        yield server


def author_of(
    server: Server, limits: CostConfig | None = None, **knobs: Any
) -> tuple[EndpointAuthor, list[CallUsage]]:
    config = AuthorConfig(base_url=server.url, model="m", **{"timeout_s": PATIENCE_S, **knobs})
    kept: list[CallUsage] = []
    return EndpointAuthor(config, SynthesisBudget(limits or CostConfig(), [], kept.append)), kept


def ask(author: EndpointAuthor, times: int = 1, **more: Any) -> list[AuthorReply | BaseException]:
    async def all_of_them() -> list[Any]:
        try:
            work = (author.ask(ASK, purpose="test", **more) for _ in range(times))
            return await asyncio.gather(*work, return_exceptions=True)
        finally:
            await author.close()

    return asyncio.run(all_of_them())


def test_request_and_reply(endpoint: Server) -> None:
    endpoint.reset()
    calls = [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
        {"id": "2", "type": "function", "function": {"name": "look", "arguments": '{"at": '}},
    ]
    message = {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": calls}
    endpoint.behave = lambda _: completion(message, prompt_tokens=7, completion_tokens=5)
    author, kept = author_of(
        endpoint, usd_per_million_prompt_tokens=1.0, usd_per_million_completion_tokens=10.0
    )
    (answer,) = ask(author, tools=(LOOK,))
    assert isinstance(answer, AuthorReply) and (answer.content, answer.reasoning) == ("", "Hm")
    good, bad = answer.calls
    assert good == ToolCall(call_id="1", name="look", arguments={"at": 1})
    assert isinstance(bad, Malformed) and bad.call_id == "2"
    (request,) = endpoint.requests
    assert request["messages"] == list(ASK) and request["tools"] == [LOOK.as_json()]
    assert [usage.tokens for usage in kept] == [12] and kept[0].purpose == "test"
    assert kept[0].usd == pytest.approx(57e-6)


def test_calls_in_flight_respect_the_budget(endpoint: Server) -> None:
    endpoint.reset()
    endpoint.behave = lambda _: replace(
        words("x", prompt_tokens=10, completion_tokens=50), delay_s=0.05
    )
    author, kept = author_of(endpoint, CostConfig(tokens=350), max_tokens=100)
    replies = ask(author, times=4)
    spent = [one for one in replies if isinstance(one, BudgetSpent)]
    assert len(endpoint.requests) == len(kept) == 2 and len(spent) == 2
    assert "budget.tokens" in str(spent[0])


def test_cancelled_call_in_flight_is_charged(endpoint: Server) -> None:
    """The endpoint continues generating; a call that was still queued has cost nothing."""
    endpoint.reset()
    endpoint.behave = lambda _: replace(words("x"), delay_s=PATIENCE_S)
    author, kept = author_of(endpoint, CostConfig(tokens=10_000), max_concurrent=1, max_tokens=7)

    async def cancelled() -> None:
        asking = [asyncio.ensure_future(author.ask(ASK, purpose="test")) for _ in range(2)]
        while not endpoint.requests:
            await asyncio.sleep(0.01)
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await author.close()

    asyncio.run(cancelled())
    assert [usage.completion_tokens for usage in kept] == [7]


@pytest.mark.parametrize(
    ("reply", "words_of_it"),
    [
        (Reply('{"error": {"message": "no such model: s3cret"}}', status=404), r"HTTP 404: .*\*"),
        (Reply("", hang_up=True), "at http"),
        (Reply("[]"), "not a chat completion"),
        (Reply('{"choices": []}'), "not a chat completion"),
        (replace(words("late"), delay_s=1000), "no reply within author.timeout_s = 0.05"),
    ],
)
def test_lost_author_reports_no_key(
    endpoint: Server, reply: Reply, words_of_it: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTHORS_KEY", "s3cret")
    endpoint.behave = lambda _: reply
    timeout_s = 0.05 if reply.delay_s else PATIENCE_S
    author, kept = author_of(endpoint, retries=0, api_key_env="AUTHORS_KEY", timeout_s=timeout_s)
    with pytest.raises(AuthorLost, match=words_of_it) as caught:
        raise ask(author)[0]  # type: ignore[misc]
    assert "s3cret" not in str(caught.value)
    # Refused requests were not computed; late ones may have been billed.
    assert bool(kept) == bool(reply.delay_s or "chat completion" in words_of_it)


def test_overlong_conversation_is_truncated(endpoint: Server) -> None:
    """Overlong conversations fail the task; a context too small for the first reply is a recipe
    error."""
    error = '{"error": {"message": "This model\'s maximum context length is 2048 tokens."}}'
    endpoint.behave = lambda _: Reply(error, status=400)

    async def both() -> list[Any]:
        author, _ = author_of(endpoint)
        try:
            later = [*ASK, {"role": "assistant", "content": "…"}, *ASK]
            work = (author.ask(prompt, purpose="test") for prompt in (ASK, later))
            return await asyncio.gather(*work, return_exceptions=True)
        finally:
            await author.close()

    first, later = asyncio.run(both())
    assert isinstance(first, AuthorLost) and "author.max_tokens = 8192" in str(first)
    assert later == AuthorReply(content="", cut=True)
