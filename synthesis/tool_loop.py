"""Lets a model call tools turn by turn. Used for set-up agents, authors and answering agents."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from keel.agents.schemas import arguments_of
from keel.agents.types import ToolResult
from keel.rl.turns import Malformed, Message, ToolCall, ToolSpec
from keel.synthesis.author import Author

_Call = Callable[[ToolCall], Awaitable[ToolResult]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLoopResult:
    """The conversation of a tool loop, with the reason the loop ended."""

    messages: tuple[Message, ...]
    """All messages, including the initial ones."""
    ended: Literal["stop", "done", "turns", "length"]
    """Why the loop ended. stop: the model made no more calls. done: a tool ended the loop. turns:
    the turn limit was reached. length: a reply was truncated."""

    @property
    def answer(self) -> str:
        """Return the text of the last assistant message."""
        last = self.messages[-1]
        return str(last.get("content") or "") if last["role"] == "assistant" else ""


async def work(
    author: Author,
    messages: Sequence[Message],
    *,
    tools: Sequence[ToolSpec],
    call: _Call,
    most_turns: int,
    purpose: str,
) -> ToolLoopResult:
    """Run a model in a tool loop until it stops calling tools or another limit ends the loop.
    `call` runs each call whose arguments match the tool's schema, with its own timeout. Any other
    call is answered with an error. Errors raised by `author` and `call` are passed on."""
    history, schemas = list(messages), arguments_of(tools)
    for _ in range(most_turns):
        reply = await author.ask(history, purpose=purpose, tools=tools)
        history.append(reply.message())
        if reply.cut:
            return ToolLoopResult(messages=tuple(history), ended="length")
        if not reply.calls:
            return ToolLoopResult(messages=tuple(history), ended="stop")
        for one in reply.calls:
            if isinstance(one, Malformed):
                result = ToolResult(text=f"malformed call: {one.why}", failed=True)
            elif complaint := schemas.complaint(one):
                result = ToolResult(text=complaint, failed=True)
            else:
                result = await call(one)
            if result.failed:
                result = ToolResult(text=f"error: {result.text}")
            history.append({"role": "tool", "tool_call_id": one.call_id, "content": result.text})
            if result.done:
                return ToolLoopResult(messages=tuple(history), ended="done")
    return ToolLoopResult(messages=tuple(history), ended="turns")


async def gather_or_cancel(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Wait for all coroutines and return their results. If one raises, the others are cancelled to
    save tokens."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def tool_spec_of(value: Mapping[str, Any]) -> ToolSpec:
    """Return the tool spec for an environment's tool."""
    return ToolSpec(
        name=value["name"], description=value["description"], parameters=value["parameters"]
    )
