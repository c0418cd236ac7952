"""Calls the models that write, solve and check tasks, turn by turn with tools. They are served by
an OpenAI-compatible endpoint and share a budget."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import openai

from keel.agents.types import ArgumentValidator, ToolResult
from keel.configs.synthesis import AuthorConfig, CostConfig
from keel.rewards.judge.prompts import BadReply
from keel.rewards.judge.servers import Server, ServerPool
from keel.rewards.judge.specs import CallError, Counts
from keel.rl.strict_json import replace_surrogates
from keel.rl.turns import (
    Malformed,
    Message,
    Parsed,
    ToolCall,
    ToolSpec,
    message_of,
    openai_message,
    parse_call,
)

_LIMITED = ("tokens", "usd")
_NOT_A_COMPLETION = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Errors raised when a reply cannot be parsed as a chat completion."""
_TOO_LONG = re.compile(
    r"context.?(length|window|size)|max(imum)?[ _]model[ _]len|prompt is too long", re.IGNORECASE
)
"""Matches the error messages of OpenAI, vLLM, SGLang and llama.cpp for a full context."""


class AuthorLost(RuntimeError):
    """Raised when an author model still doesn't respond after all retries. The task is tried again
    the next time the command is run."""


class BudgetSpent(RuntimeError):
    """Raised when the next call could go over the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallUsage:
    model: str
    purpose: str
    prompt_tokens: int
    completion_tokens: int
    usd: float

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class SynthesisBudget:
    """Tracks tokens and money spent or reserved for calls in flight. Each instance must be used
    from a single event loop."""

    def __init__(
        self, limits: CostConfig, spent: Sequence[CallUsage], record: Callable[[CallUsage], None]
    ) -> None:
        """Create a budget. `spent` is the usage from earlier starts, and `record` is called with
        each new call's usage."""
        self._limits, self._record = limits, record
        self._spent = {name: sum(getattr(usage, name) for usage in spent) for name in _LIMITED}
        self._reserved = list[CallUsage]()

    @contextmanager
    def call(self, most: CallUsage) -> Generator[Callable[[CallUsage], None]]:
        """Reserve the maximum usage of a call, and yield a function that records its actual usage.
        Raises BudgetSpent if the reservation would go over the budget."""
        self._reserved.append(most)
        try:
            for name in _LIMITED:
                limit: float = getattr(self._limits, name)
                spent = self._spent[name]
                reserved = sum(getattr(usage, name) for usage in self._reserved)
                if limit and spent + reserved > limit:
                    reason = f"{spent:,.8g} spent, and calls may take {reserved:,.8g}"
                    raise BudgetSpent(
                        f"budget.{name} = {limit:,.8g}: {reason}. Raise it to continue"
                    )
            yield self._take
        finally:
            self._reserved.remove(most)

    def _take(self, usage: CallUsage) -> None:
        for name in _LIMITED:
            self._spent[name] += getattr(usage, name)
        self._record(usage)


class Author:
    """A model that writes, solves or checks tasks, served by one or more OpenAI-compatible servers.
    Each instance must be used from a single event loop."""

    def __init__(self, config: AuthorConfig, budget: SynthesisBudget) -> None:
        self.name = config.model
        self._config, self._budget = config, budget
        self._others: list[Author] = []
        self._pool = ServerPool(
            config.base_url,
            section="author",
            api_key_env=config.api_key_env,
            max_concurrent=config.max_concurrent,
            timeout_s=config.timeout_s,
            counts=Counts(),
        )

    async def ask(
        self, messages: Sequence[Message], *, purpose: str, tools: Sequence[ToolSpec] = ()
    ) -> Parsed:
        """Send a conversation and return the model's response. `purpose` is the category under
        which its tokens are counted. A truncated response isn't `closed`. If the conversation
        doesn't fit in the context window, the response is empty and not closed. Raises AuthorLost
        if the model doesn't respond, and BudgetSpent if the call could go over the budget."""
        attempt, server = 0, None
        while True:
            async with self._pool.acquire(server) as server:
                client = server.client
                try:
                    reply = await self._call(server, messages, purpose=purpose, tools=tools)
                    server.failures = 0
                    return reply
                except CallError as error:
                    self._pool.count_failure(server, client, error)
                    attempt += 1
                    if not error.retry or attempt > self._config.retries:
                        raise AuthorLost(f"{self.name} at {error.reason}") from error
                    await self._pool.pause(attempt, error)

    async def _call(
        self,
        server: Server,
        messages: Sequence[Message],
        *,
        purpose: str,
        tools: Sequence[ToolSpec],
    ) -> Parsed:
        config, client = self._config, server.client
        assert client is not None
        offered = [tool.as_json() for tool in tools]
        request = replace_surrogates([openai_message(message) for message in messages])
        # A token has at least one byte.
        most = self._usage(
            purpose,
            len(json.dumps([*request, *offered], ensure_ascii=False).encode()),
            config.max_tokens,
        )
        with self._budget.call(most) as take:
            try:
                # The library's timeout applies to each read.
                async with asyncio.timeout(config.timeout_s):
                    response = await client.chat.completions.with_raw_response.create(
                        model=config.model,
                        messages=request,
                        tools=cast(Any, offered or openai.omit),
                        temperature=config.temperature,
                        max_tokens=config.max_tokens,
                        extra_body=dict(config.extra) or None,
                    )
            except asyncio.CancelledError:
                take(most)  # the endpoint may continue and bill it
                raise
            except (TimeoutError, openai.APIError) as error:
                if isinstance(error, TimeoutError | openai.APITimeoutError):
                    take(most)  # it may have been generating all the time
                too_long = isinstance(error, openai.APIStatusError) and _TOO_LONG.search(
                    f"{error.message} {error.code}"
                )
                if too_long and any(message.get("role") == "assistant" for message in messages):
                    return Parsed(content="", reasoning="", closed=False)
                failure = self._pool.failure_of(error, server)
                if too_long:
                    failure.retry = False
                    failure.reason += f"; lower author.max_tokens = {config.max_tokens}"
                raise failure from error
            try:
                reply, counts = _parse_completion(response.text)
            except _NOT_A_COMPLETION as error:
                take(most)
                failure = BadReply("not a chat completion")
                raise self._pool.failure_of(failure, server) from error
            take(self._usage(purpose, *counts) if all(counts) else most)
            return reply

    def _usage(self, purpose: str, prompt: int, completion: int) -> CallUsage:
        prices = (
            self._config.usd_per_million_prompt_tokens,
            self._config.usd_per_million_completion_tokens,
        )
        return CallUsage(
            model=self.name,
            purpose=purpose,
            prompt_tokens=prompt,
            completion_tokens=completion,
            usd=(prompt * prices[0] + completion * prices[1]) / 1e6,
        )

    def another(self, changes: Mapping[str, Any]) -> Author:
        """Create an author with different settings. It shares this author's budget and is closed
        along with it. If its URL is different, it doesn't inherit the API key or the prices. Raises
        ValueError if the settings are invalid."""
        if changes.get("base_url", self._config.base_url) != self._config.base_url:
            prices = dict.fromkeys(
                ("usd_per_million_prompt_tokens", "usd_per_million_completion_tokens"), 0.0
            )
            changes = {"api_key_env": "", **prices, **changes}
        self._others.append(Author(replace(self._config, **changes), self._budget))
        return self._others[-1]

    async def close(self) -> None:
        for other in self._others:
            await other.close()
        await self._pool.close()


def _parse_completion(text: str) -> tuple[Parsed, tuple[int, int]]:
    """Parse a chat completion into the response and the token counts of prompt and completion,
    which are 0 if the endpoint doesn't report any."""
    body = replace_surrogates(json.loads(text))
    choice = body["choices"][0]
    message = choice["message"]
    calls: Sequence[Any] = message.get("tool_calls") or ()
    functions: Sequence[Any] = [call.get("function") or {} for call in calls]
    reply = Parsed(
        content=str(message.get("content") or ""),
        reasoning="",
        closed=choice.get("finish_reason") != "length",
        calls=tuple(
            parse_call(
                str(call.get("id") or ""),
                str(function.get("name") or ""),
                str(function.get("arguments") or "{}"),
            )
            for call, function in zip(calls, functions, strict=True)
        ),
    )
    usage: Mapping[str, int | None] = body.get("usage") or {}
    return reply, (usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0)


_Call = Callable[[ToolCall], Awaitable[ToolResult]]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLoopResult:
    messages: tuple[Message, ...]
    ended: Literal["stop", "done", "turns", "length"]
    """Why the loop ended. stop: the model made no more calls. done: a tool ended the loop. turns:
    the turn limit was reached. length: a reply was truncated."""

    @property
    def answer(self) -> str:
        last = self.messages[-1]
        return str(last.get("content") or "") if last["role"] == "assistant" else ""


async def run_tool_loop(
    author: Author,
    messages: Sequence[Message],
    *,
    tools: Sequence[ToolSpec],
    call: _Call,
    most_turns: int,
    purpose: str,
) -> ToolLoopResult:
    """Let a model call tools until it stops or hits a limit. `call` executes the tool calls with
    valid arguments, and has its own timeout. Invalid calls are answered with an error. Exceptions
    from `author` and `call` propagate."""
    history, schemas = list(messages), ArgumentValidator(tools)
    for _ in range(most_turns):
        reply = await author.ask(history, purpose=purpose, tools=tools)
        history.append(message_of(reply))
        if not reply.closed:
            return ToolLoopResult(messages=tuple(history), ended="length")
        if not reply.calls:
            return ToolLoopResult(messages=tuple(history), ended="stop")
        for one in reply.calls:
            if isinstance(one, Malformed):
                result = ToolResult(text=f"malformed call: {one.why}", failed=True)
            elif complaint := schemas.explain_error(one):
                result = ToolResult(text=complaint, failed=True)
            else:
                result = await call(one)
            if result.failed:
                result = ToolResult(text=f"error: {result.text}")
            history.append({"role": "tool", "tool_call_id": one.call_id, "content": result.text})
            if result.done:
                return ToolLoopResult(messages=tuple(history), ended="done")
    return ToolLoopResult(messages=tuple(history), ended="turns")


async def gather_or_cancel(*work: Coroutine[Any, Any, _T]) -> list[_T]:
    """Await all coroutines and return their results. If one raises, cancel the others to save
    tokens."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]
