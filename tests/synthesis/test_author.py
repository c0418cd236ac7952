"""Requests, replies and cost limits of an author behind an endpoint."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from keel.agents.types import ToolResult
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
from keel.synthesis.general.gates import MAX_MUTATIONS, mutations, plausible
from keel.synthesis.general.pipeline import renamed, sections
from keel.synthesis.ledger import Rejected
from keel.synthesis.tool_loop import ToolLoopResult, work
from tests.rewards.judge.judge_server import Reply, Server, running
from tests.synthesis.authors import ScriptedAuthor, completion
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
    ("reply", "billed"),
    [
        (Reply('{"error": {"message": "no such model: s3cret"}}', status=404), False),
        (Reply("", hang_up=True), False),
        (Reply("[]"), True),
        (Reply('{"choices": []}'), True),
        (replace(words("late"), delay_s=1000), True),
    ],
)
def test_lost_author_reports_no_key(
    endpoint: Server, reply: Reply, billed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTHORS_KEY", "s3cret")
    endpoint.behave = lambda _: reply
    timeout_s = 0.05 if reply.delay_s else PATIENCE_S
    author, kept = author_of(endpoint, retries=0, api_key_env="AUTHORS_KEY", timeout_s=timeout_s)
    with pytest.raises(AuthorLost) as caught:
        raise ask(author)[0]  # type: ignore[misc]
    assert "s3cret" not in str(caught.value)
    assert bool(kept) == billed  # late ones may have been computed


def test_overlong_conversation_is_truncated(endpoint: Server) -> None:
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


ADD = ToolSpec(
    name="add",
    description="",
    parameters={
        **{"type": "object", "required": ["a"], "additionalProperties": False},
        "properties": {"a": {"type": "integer"}},
    },
)


def worked(
    *script: AuthorReply | str, most_turns: int = 5
) -> tuple[ToolLoopResult, list[ToolCall]]:
    ran: list[ToolCall] = []

    async def call(one: ToolCall) -> ToolResult:
        ran.append(one)
        a = one.arguments["a"]
        return ToolResult(text=str(a + 1), failed=a == 13, done=a == 99)

    author, how = ScriptedAuthor(list(script)), {"most_turns": most_turns, "purpose": "test"}
    done = work(author, [{"role": "user", "content": "Count."}], tools=[ADD], call=call, **how)
    return asyncio.run(done), ran


def add(a: object, number: str = "1") -> ToolCall:
    return ToolCall(call_id=number, name="add", arguments={"a": a})


def results(done: ToolLoopResult) -> list[str]:
    return [message["content"] for message in done.messages if message["role"] == "tool"]


def test_it_calls_until_it_has_an_answer() -> None:
    broken = Malformed(call_id="3", text="add(", why="no JSON")
    done, ran = worked(
        AuthorReply(content="", calls=(add(1), add("one", "2"), broken)),
        AuthorReply(content="", calls=(add(13),)),
        "two",
    )
    assert [one.arguments["a"] for one in ran] == [1, 13]
    first, second, third, fourth = results(done)
    assert first == "2" and "integer" in second and "no JSON" in third and fourth == "error: 14"
    assert (done.ended, done.answer) == ("stop", "two")
    requests = [message for message in done.messages if message.get("tool_calls")]
    assert [one["id"] for one in requests[0]["tool_calls"]] == ["1", "2", "3"]


def test_other_endings() -> None:
    assert worked(AuthorReply(content="", calls=(add(99), add(1))))[0].ended == "done"
    cut, ran = worked(AuthorReply(content="I th", calls=(add(1),), cut=True))
    assert cut.ended == "length" and not ran
    forever = [AuthorReply(content="", calls=(add(1),))] * 9
    done, ran = worked(*forever, most_turns=3)
    assert (done.ended, done.answer, len(ran)) == ("turns", "", 3)


REPLY = """\
Here is a harder one.

## question
Which is it? A list.

### solve.py
```python
# tools
def solve(tools):
    return [1]
```

## verify:
~~~
def verify(answer, database):
    return answer == [1]
~~~
"""


def test_sections_of_a_reply() -> None:
    parts = sections(AuthorReply(content=REPLY), ("question", "solve", "verify"), ("tools",))
    assert list(parts) == ["question", "solve", "verify"]
    assert parts["question"] == "Which is it? A list.\n"
    assert renamed(parts["solve"], "solve", 2).startswith("# tools\ndef solve_2(tools):")
    assert parts["verify"].endswith("== [1]\n")
    capitals = REPLY.replace("## verify", "## Verify")
    assert sections(AuthorReply(content=capitals), ("question", "solve", "verify")) == parts
    for cut, text in ((True, REPLY), (False, REPLY.replace("verify:", "proof"))):
        with pytest.raises(Rejected):
            sections(AuthorReply(content=text, cut=cut), ("question", "solve", "verify"))
    with pytest.raises(Rejected):
        renamed("def solve(tools):\n    pass\ndef solve(tools):\n    pass", "solve", 0)


def test_mutations_reach_every_part() -> None:
    answer = {"days": [{"hotel": "Inn", "price": 3}, {"hotel": "House", "price": 2.5}], "ok": True}
    items = mutations(answer)
    labels = [name for name, _ in items]
    assert len(labels) == len(set(labels)) and all(other != answer for _, other in items)
    for part in (
        "['days'][0]['hotel'] = ''",
        "['days'][1]['price'] = -3.5",
        "['days'][0] without 'price'",
        "['days'] without entry 1",
        "['days'] with an entry twice",
        "['ok'] = False",
        "the answer without 'ok'",
    ):
        assert part in labels
    assert answer["days"][0] == {"hotel": "Inn", "price": 3}  # none of it was changed
    assert len(mutations({"long": list(range(500))})) == MAX_MUTATIONS
    others = plausible(answer, ["Inn", "Park"], 1)
    assert others == plausible(answer, ["Inn", "Park"], 1) and answer not in others
    assert {one["days"][0]["hotel"] for one in others} == {"Inn", "Park"}
