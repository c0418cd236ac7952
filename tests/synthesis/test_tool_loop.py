"""The tool loop of a model."""

from __future__ import annotations

import asyncio

from keel.agents.types import ToolResult
from keel.rl.turns import Malformed, ToolCall, ToolSpec
from keel.synthesis.author import AuthorReply
from keel.synthesis.tool_loop import ToolLoopResult, work
from tests.synthesis.authors import ScriptedAuthor

ADD = ToolSpec(
    name="add",
    description="",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
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

    return asyncio.run(
        work(
            ScriptedAuthor(list(script)),
            [{"role": "user", "content": "Count."}],
            tools=[ADD],
            call=call,
            most_turns=most_turns,
            purpose="test",
        )
    ), ran


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
    assert first == "2" and "'one' is not of type 'integer' (at $.a)" in second
    assert third == "error: malformed call: no JSON" and fourth == "error: 14"
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
