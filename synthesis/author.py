"""The models that write, solve and check tasks: behind any OpenAI-compatible endpoint, within a
budget."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import openai
from openai import AsyncOpenAI, Timeout

from keel.configs.synthesis import AuthorConfig, CostConfig
from keel.rewards.judge.client import bounded_http
from keel.rl.turns import Malformed, Message, ToolCall, ToolSpec

CONNECT_S = 10.0
MOST_SAID = 300
TOO_LONG = re.compile(
    r"context.?(length|window|size)|max(imum)?[ _]model[ _]len|prompt is too long", re.IGNORECASE
)
"""In what OpenAI, vLLM, SGLang and llama.cpp say where their context has no room."""


class AuthorLost(RuntimeError):
    """A model did not answer, however often it was asked. The task is tried again by the next
    start."""


class BudgetSpent(RuntimeError):
    """The next call might cost more than there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of one call."""

    model: str
    purpose: str
    prompt_tokens: int
    completion_tokens: int
    usd: float

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A reply."""

    content: str
    calls: tuple[ToolCall | Malformed, ...] = ()
    reasoning: str = ""
    cut: bool = False
    """It was longer than `max_tokens`, or the conversation has outgrown the model's context. Its
    calls are not to be run."""

    def message(self) -> Message:
        """As the next request has it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [_as_json(call) for call in self.calls]
        return message


class Author(Protocol):
    """A model that is asked. What is asked for one task waits for nothing but its own replies."""

    name: str

    async def ask(
        self, messages: Sequence[Message], *, purpose: str, tools: Sequence[ToolSpec] = ()
    ) -> Said:
        """purpose: what the tokens are counted under. A conversation for which the model's context
        has become too short gets an empty reply, cut off. Raises AuthorLost, BudgetSpent."""
        ...


class Budget:
    """What has been spent, and what calls in flight may yet come to. For one event loop."""

    def __init__(
        self, limits: CostConfig, spent: Sequence[Usage], record: Callable[[Usage], None]
    ) -> None:
        """spent: by earlier starts; record: keeps a call's usage for later ones."""
        self._limits, self._record = limits, record
        self.tokens = sum(usage.tokens for usage in spent)
        self.usd = sum(usage.usd for usage in spent)
        self._held_tokens, self._held_usd = 0, 0.0

    @contextmanager
    def call(self, tokens: int, usd: float) -> Any:
        """A call of at most that much. Raises BudgetSpent where it might be too much; yields what
        takes its usage."""
        for name, limit, now, held, more in (
            ("tokens", self._limits.tokens, self.tokens, self._held_tokens, tokens),
            ("usd", self._limits.usd, self.usd, self._held_usd, usd),
        ):
            if limit and now + held + more > limit:
                raise BudgetSpent(
                    f"budget.{name} = {_said(limit)}: {_said(now)} are spent, and the next call "
                    f"and those under way may take {_said(held + more)}; raise it and start again "
                    "to go on"
                )
        self._held_tokens += tokens
        self._held_usd += usd
        try:
            yield self._took
        finally:
            self._held_tokens -= tokens
            self._held_usd -= usd

    def _took(self, usage: Usage) -> None:
        self.tokens += usage.tokens
        self.usd += usage.usd
        self._record(usage)


class EndpointAuthor:
    """A model behind an OpenAI-compatible endpoint. Belongs to one event loop."""

    def __init__(self, config: AuthorConfig, budget: Budget) -> None:
        """Raises ValueError without its key."""
        key = os.environ.get(config.api_key_env, "").strip() if config.api_key_env else ""
        if config.api_key_env and not key:
            raise ValueError(
                f"author.api_key_env = {config.api_key_env}: there is no such environment variable"
            )
        self.name = config.model
        self._config, self._budget, self._key = config, budget, key
        self._others: list[EndpointAuthor] = []
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._client = AsyncOpenAI(
            base_url=config.base_url,
            # Never the library's own OPENAI_API_KEY: that key belongs to somebody else.
            api_key=key or "none",
            max_retries=config.retries,
            timeout=Timeout(config.timeout_s, connect=min(CONNECT_S, config.timeout_s)),
            http_client=bounded_http(),
        )

    async def ask(
        self, messages: Sequence[Message], *, purpose: str, tools: Sequence[ToolSpec] = ()
    ) -> Said:
        config = self._config
        offered = [tool.as_json() for tool in tools]
        asked = _encodable(list(messages))
        bound = most_tokens(json.dumps([*asked, *offered], ensure_ascii=False)), config.max_tokens

        def used(tokens: tuple[int, int]) -> Usage:
            return Usage(
                model=self.name,
                purpose=purpose,
                prompt_tokens=tokens[0],
                completion_tokens=tokens[1],
                usd=self._price(*tokens),
            )

        async with self._slots:
            with self._budget.call(sum(bound), self._price(*bound)) as took:
                try:
                    # The library's own deadline is of each attempt, and of each read.
                    async with asyncio.timeout(config.timeout_s * (1 + config.retries)):
                        response = await self._client.chat.completions.with_raw_response.create(
                            model=config.model,
                            messages=asked,
                            tools=cast(Any, offered or openai.omit),
                            temperature=config.temperature,
                            max_tokens=config.max_tokens,
                            extra_body=dict(config.extra) or None,
                        )
                except asyncio.CancelledError:
                    took(used(bound))  # the endpoint continues generating, and bills it
                    raise
                except (TimeoutError, openai.APITimeoutError) as error:
                    took(used(bound))  # it may have been at work on it all the time
                    raise AuthorLost(
                        f"{self.name}: no reply within author.timeout_s = {config.timeout_s:g}"
                    ) from error
                except openai.APIStatusError as error:
                    cure = ""
                    if _too_long(error):
                        if any(message.get("role") == "assistant" for message in messages):
                            return Said(content="", cut=True)
                        cure = (
                            "; no room for the first reply: lower author.max_tokens = "
                            f"{config.max_tokens}, or give the model a longer context"
                        )
                    said = self._public(f"HTTP {error.status_code}: {error.message}")
                    raise AuthorLost(f"{self.name}: {said}{cure}") from error
                except openai.APIError as error:
                    why = self._public(str(error.__cause__ or error))
                    raise AuthorLost(f"{self.name} at {config.base_url}: {why}") from error
                said, usage = _read(response.text, bound[0])
                took(used(usage))
                if said is None:
                    raise AuthorLost(f"{self.name}: its reply is no chat completion")
                return said

    def another(self, changes: Mapping[str, Any]) -> EndpointAuthor:
        """With other settings, and of the same budget; closed with this one. Raises ValueError."""
        self._others.append(EndpointAuthor(replace(self._config, **changes), self._budget))
        return self._others[-1]

    async def close(self) -> None:
        """End the connections."""
        for other in self._others:
            await other.close()
        await self._client.close()

    def _price(self, prompt_tokens: int, completion_tokens: int) -> float:
        config = self._config
        return (
            prompt_tokens * config.usd_per_million_prompt_tokens
            + completion_tokens * config.usd_per_million_completion_tokens
        ) / 1e6

    def _public(self, text: str) -> str:
        text = (text.replace(self._key, "***") if self._key else text)[:MOST_SAID]
        return "".join(c if c.isprintable() else " " for c in text)


def most_tokens(text: str) -> int:
    """That it can have: a token is a byte at least, with any of today's tokenizers."""
    return len(text.encode(errors="replace"))


def _read(text: str, asked: int) -> tuple[Said | None, tuple[int, int]]:
    """The reply, and the tokens of its prompt and of itself: as many as can be (`asked`, of the
    prompt) where the endpoint does not count them."""
    try:
        body = _encodable(json.loads(text))
        choice = body["choices"][0]
        message = choice["message"]
        content = str(message.get("content") or "")
        said = Said(
            content=content,
            reasoning=str(message.get("reasoning_content") or message.get("reasoning") or ""),
            calls=tuple(_call(given) for given in message.get("tool_calls") or ()),
            cut=choice.get("finish_reason") == "length",
        )
        usage = dict(body.get("usage") or {})
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None, (asked, most_tokens(text))
    written = most_tokens(content + said.reasoning + str(message.get("tool_calls") or ""))
    return said, (
        _count(usage.get("prompt_tokens"), asked),
        _count(usage.get("completion_tokens"), written),
    )


def _too_long(error: openai.APIStatusError) -> bool:
    """Whether a request was refused since the model's context has no room for it."""
    said = f"{error.message} {error.code}"
    return error.status_code in (400, 413) and TOO_LONG.search(said) is not None


def _count(said: Any, bound: int) -> int:
    """What an endpoint says, where that is a number of tokens."""
    return said if type(said) is int and said > 0 else bound


def _call(given: Mapping[str, Any]) -> ToolCall | Malformed:
    number = str(given.get("id") or "")
    function = cast(dict[str, Any], given.get("function") or {})
    name, text = str(function.get("name") or ""), str(function.get("arguments") or "{}")
    try:
        arguments = _encodable(json.loads(text))
        if not isinstance(arguments, dict):
            raise ValueError("the arguments are no JSON object")
    except (ValueError, RecursionError) as error:  # the second: brackets in brackets
        return Malformed(call_id=number, text=f"{name}({text})"[:MOST_SAID], why=str(error))
    return ToolCall(call_id=number, name=name, arguments=cast(dict[str, Any], arguments))


def _said(value: float) -> str:
    """An amount: dollars in cents and less, tokens whole."""
    return f"{int(value):,}" if value == int(value) else f"{value:,.6g}"


def _encodable(value: Any) -> Any:
    """With ? for half of a surrogate pair, which JSON's escapes can say and no request can."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def _as_json(call: ToolCall | Malformed) -> dict[str, Any]:
    name, arguments = "unreadable", "{}"
    if isinstance(call, ToolCall):
        name, arguments = call.name, json.dumps(dict(call.arguments), ensure_ascii=False)
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
