"""A model at work with tools, turn by turn, until it has nothing more to call: the set-up agent, an
author who looks things up, an agent who tries to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from keel.agents.schemas import Arguments, arguments_of
from keel.agents.types import ToolResult
from keel.rl.turns import Malformed, Message, ToolCall, ToolSpec
from keel.synthesis.author import Author

Call = Callable[[ToolCall], Awaitable[ToolResult]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worked:
    """What came of it."""

    messages: tuple[Message, ...]
    """All of them, those it was given too."""
    ended: Literal["stop", "done", "turns", "length"]
    """It called nothing more; a tool said so; it had no more turns; its last reply was cut off."""

    @property
    def answer(self) -> str:
        """Its last words."""
        last = self.messages[-1]
        return str(last.get("content") or "") if last["role"] == "assistant" else ""


async def work(
    author: Author,
    messages: Sequence[Message],
    *,
    tools: Sequence[ToolSpec],
    call: Call,
    most_turns: int,
    purpose: str,
) -> Worked:
    """call: runs one whose arguments fit its tool's schema, within a deadline of its own; what does
    not fit is answered with what is wrong. Raises what `author` and `call` raise."""
    said, schemas = list(messages), arguments_of(tools)
    for _ in range(most_turns):
        reply = await author.ask(said, purpose=purpose, tools=tools)
        said.append(reply.message())
        if reply.cut:
            return Worked(messages=tuple(said), ended="length")
        if not reply.calls:
            return Worked(messages=tuple(said), ended="stop")
        for one in reply.calls:
            result = await _result(one, schemas, call)
            said.append({"role": "tool", "tool_call_id": one.call_id, "content": result.text})
            if result.done:
                return Worked(messages=tuple(said), ended="done")
    return Worked(messages=tuple(said), ended="turns")


async def _result(one: ToolCall | Malformed, schemas: Arguments, call: Call) -> ToolResult:
    if isinstance(one, Malformed):
        return ToolResult(text=f"error: this is no call: {one.why}", failed=True)
    if complaint := schemas.complaint(one):
        return ToolResult(text=f"error: {complaint}", failed=True)
    result = await call(one)
    return ToolResult(text=f"error: {result.text}") if result.failed else result


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """The results of all. What one raises ends the others, which would go on to spend tokens."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def spec_of(given: Mapping[str, Any]) -> ToolSpec:
    """Of a tool as environments have it."""
    return ToolSpec(
        name=given["name"], description=given["description"], parameters=given["parameters"]
    )
