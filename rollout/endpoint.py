"""Samples from models behind an OpenAI-compatible endpoint, for evaluation only.

An endpoint returns text and token counts, but no token ids or log-probabilities, so its completions
cannot be used for training. `EndpointCompletions` samples groups of completions. `EndpointTurns`
samples conversations turn by turn, as an engine does.
"""

import asyncio
import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Self, TypeVar, cast

import numpy as np

from keel.configs.schema import EndpointConfig, SamplingConfig
from keel.rl.futures import LoopThread, cancel_tasks
from keel.rl.turns import (
    THINK,
    Message,
    Parsed,
    ToolSpec,
    TurnRequest,
    TurnResult,
    message_of,
    openai_message,
    parse_call,
    prompt_of,
)
from keel.rl.types import Group, Prompt, Purpose, Segment, Trajectory
from keel.rollout.chat.render import drop_old_thinking

T = TypeVar("T")
_CONNECT_S = 10.0
_MAX_SHOWN = 300
LATER = "later: "  # starts the reason for a drop if the same request may succeed later
_FORBIDDEN = 403
_SHARED_STATUS = frozenset({401, 402, 404})  # a wrong API key, balance or address
_BUSY_STATUS = frozenset({408, 409, 429, *range(500, 600)})  # HTTP statuses of temporary failures
_MAX_FAILURES = 64  # consecutive forbidden or disconnected requests of an unusable endpoint
_UNKNOWN_ID = -1
_CHARACTERS_PER_TOKEN = 4  # for openings and tool results, whose tokens are not counted
_MAX_TURN_S = 86_400.0
_REASONING_FIELDS = ("reasoning_content", "reasoning")
_THINKING = _REASONING_FIELDS[0]  # message key under which Keel stores the reasoning


@dataclass(frozen=True, slots=True)
class _Reply:
    content: str
    reasoning: str
    reasoning_field: str  # message key under which the endpoint returned the reasoning
    calls: tuple[tuple[str, str], ...]  # name and arguments, as the endpoint returned them
    tokens: int
    cut: bool
    seconds: float


class EndpointCompletions:
    """Samples completions from an endpoint on a separate thread. Use it as a context manager."""

    def __init__(self, config: EndpointConfig) -> None:
        """Read the API key. Raises ValueError if its environment variable isn't set."""
        key = os.environ.get(config.api_key_env, "").strip() if config.api_key_env else ""
        if config.api_key_env and not key:
            raise ValueError(
                f"endpoint.api_key_env = {config.api_key_env}: no such environment variable"
            )
        self._config, self._key = config, key
        self._failures = _MAX_FAILURES  # before the first reply, one failure is enough

    def __enter__(self) -> Self:
        from openai import AsyncOpenAI, Timeout  # noqa: PLC0415  slow, for few commands

        config = self._config
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._client = AsyncOpenAI(
            base_url=config.base_url,
            # Never the library's OPENAI_API_KEY, which is meant for another endpoint.
            api_key=self._key or "none",
            max_retries=config.retries,
            timeout=Timeout(config.timeout_s, connect=min(_CONNECT_S, config.timeout_s)),
        )
        self.thread = LoopThread("keel-endpoint")
        return self

    def __exit__(self, *_: object) -> None:
        async def close() -> None:
            await cancel_tasks()
            await self._client.close()

        self.thread.stop(close())

    def submit(self, prompt: Prompt, *, group_size: int, sampling: SamplingConfig) -> Future[Group]:
        """Start sampling a group of completions. The group lists the reason for each failed
        completion. The future raises RuntimeError if the endpoint is unusable."""

        async def group() -> Group:
            most, thinking = sampling.max_tokens, prompt.thinking
            request = partial(self.complete, prompt.messages, prompt.tools, sampling)
            replies = await asyncio.gather(
                *(request(max_tokens=most, thinking=thinking) for _ in range(group_size))
            )
            trajectories = tuple(
                _trajectory(prompt, sibling, reply)
                for sibling, reply in enumerate(replies)
                if not isinstance(reply, str)
            )
            dropped = tuple(reply for reply in replies if isinstance(reply, str))
            return Group(prompt=prompt, trajectories=trajectories, dropped=dropped)

        return self.thread.submit(group())

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingConfig,
        *,
        max_tokens: int,
        thinking: bool,
        within_s: float = inf,
    ) -> _Reply | str:
        """Request a chat completion. Returns the response, or an error message if the request
        failed.

        Raises RuntimeError if the endpoint is unusable, and TimeoutError after `within_s` seconds.
        The time spent waiting for a free slot (`endpoint.max_concurrent`) doesn't count.
        """
        import openai  # noqa: PLC0415  as above

        config = self._config
        extra = dict(config.extra)
        if sampling.top_k and not sampling.greedy:  # not every endpoint knows `top_k`
            extra["top_k"] = sampling.top_k
        if config.tells_thinking:
            mode = {"enable_thinking": thinking, "thinking": thinking}
            extra["chat_template_kwargs"] = {**extra.get("chat_template_kwargs", {}), **mode}
        late = f"no reply within endpoint.timeout_s = {config.timeout_s:g}"
        limit_s = min(within_s, config.timeout_s * (1 + config.retries))
        try:
            async with self._slots, asyncio.timeout(limit_s):
                begin = time.monotonic()
                response = await self._client.chat.completions.create(
                    model=config.model,
                    messages=cast(Any, [dict(message) for message in messages]),
                    tools=cast(Any, [dict(tool) for tool in tools] or openai.omit),
                    temperature=0.0 if sampling.greedy else sampling.temperature,
                    top_p=sampling.top_p,
                    max_tokens=max_tokens,
                    stop=list(sampling.stop) or None,
                    extra_body=extra or None,
                )
                self._failures = 0
                body = response.model_dump(warnings=False)
                return _read_reply(body, seconds=time.monotonic() - begin)
        except TimeoutError:  # while the client retries
            if limit_s == within_s:
                raise
            return LATER + late
        except openai.APITimeoutError:
            return late
        except openai.APIStatusError as error:
            status = error.status_code
            why = self._printable(f"the endpoint returned HTTP {status}: {error.message}")
            if status in _SHARED_STATUS or (status == _FORBIDDEN and self._fails_again()):
                raise self._unusable(why) from error
            return LATER * (status in _BUSY_STATUS) + why
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            why = self._printable(f"the connection to the endpoint failed: {cause}")
            if self._fails_again():
                raise self._unusable(why) from error
            return LATER + why
        except (openai.APIError, ValueError, AttributeError) as error:
            return self._printable(f"the endpoint's reply is invalid: {error}")

    def _fails_again(self) -> bool:
        """Count a failed request. Returns True if so many requests in a row have failed that the
        endpoint must be to blame."""
        self._failures += 1
        return self._failures > _MAX_FAILURES

    def _unusable(self, why: str) -> RuntimeError:
        return RuntimeError(f"endpoint.base_url = {self._config.base_url}: {why}")

    def _printable(self, text: str) -> str:
        text = (text.replace(self._key, "***") if self._key else text)[:_MAX_SHOWN]
        return "".join(c if c.isprintable() else " " for c in text)


def _read_reply(body: Any, *, seconds: float) -> _Reply | str:
    try:
        choice, usage = body["choices"][0], body.get("usage")
        message = choice["message"]
        field = next((key for key in _REASONING_FIELDS if message.get(key)), _THINKING)
        reasoning = str(message.get(field) or "")
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [(str(one["name"]), str(one.get("arguments") or "{}")) for one in functions]
        content, cut = str(message.get("content") or ""), choice.get("finish_reason") == "length"
    except (LookupError, TypeError, AttributeError) as error:
        return f"the endpoint's reply is not a chat completion: {error!r}"
    tokens: Any = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    if not isinstance(tokens, int) or tokens < 1:
        return "the endpoint does not count the tokens of its completions"
    return _Reply(content, reasoning, field, tuple(calls), tokens, cut, seconds)


def _trajectory(prompt: Prompt, sibling: int, reply: _Reply) -> Trajectory:
    content, reasoning, tokens = reply.content, reply.reasoning, reply.tokens
    raw = f"{THINK.open}{reasoning}{THINK.close}{content}" if reasoning else content
    message = {"role": "assistant", "content": content.strip(), "raw": raw}
    if reasoning.strip():
        message["reasoning_content"] = reasoning.strip()
    segment = Segment(
        prompt_id=prompt.prompt_id,
        token_ids_T=np.full(tokens + 1, _UNKNOWN_ID, np.int32),
        trainable_T=np.arange(tokens + 1) > 0,
        logp_old_T=np.zeros(tokens + 1, np.float32),
        version_T=np.zeros(tokens + 1, np.int32),
    )
    return Trajectory(
        prompt_id=prompt.prompt_id,
        sibling=sibling,
        segments=(segment,),
        finish_reason="length" if reply.cut else "stop",
        messages=(message,),
    )


class _TurnLost(OSError):
    """Raised if the endpoint fails to return a turn. The episode is then dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    messages: tuple[Message, ...]  # messages in the endpoint's format, including their thinking
    tools: tuple[ToolSpec, ...] = ()
    thinking: bool = False
    reply: Parsed | None = None


class EndpointTurns:
    """Samples turns from an endpoint and implements `keel.rl.turns.Chat` for it.

    The token ids are unknown, so each part of a conversation is represented by placeholder ids: the
    part's number, followed by filler ids up to the part's length in tokens.
    """

    stop_ids: tuple[int, ...] = ()

    def __init__(
        self, completions: EndpointCompletions, sampling: Mapping[Purpose, SamplingConfig]
    ) -> None:
        self._completions, self._sampling = completions, sampling
        self._parts: dict[int, _Part] = {}
        self._by_prompt: dict[str, set[int]] = {}  # accessed only on the event loop
        self._numbers = itertools.count()
        self._reasoning_field = _THINKING

    def opening(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, thinking: bool
    ) -> list[int]:
        part = _Part(
            messages=tuple(map(_to_endpoint_format, messages)),
            tools=tuple(tools),
            thinking=thinking,
        )
        shown = [*self._drop_old_thinking(part.messages), *(tool.as_json() for tool in tools)]
        return self._add_part(part, shown)

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], *, thinking: bool
    ) -> list[int]:
        sent = tuple(map(_to_endpoint_format, messages))
        return [*ids, *self._add_part(_Part(messages=sent), sent)]

    def parse(
        self,
        sampled: Sequence[int],
        tools: Sequence[ToolSpec],
        *,
        thinking: bool,
        turn: int,
        in_thinking: bool = False,
    ) -> Parsed:
        reply = self._parts[sampled[0]].reply
        assert reply is not None
        return reply

    def turn(self, request: TurnRequest, purpose: Purpose) -> Future[TurnResult]:
        """Start sampling a turn. The future raises _TurnLost if the endpoint doesn't return one,
        and RuntimeError if the endpoint is unusable."""
        return self._completions.thread.submit(self._turn(request, self._sampling[purpose]))

    def forget(self, prompt: Prompt) -> Future[None]:
        """Delete the stored conversations of a prompt. Call this once they have finished."""

        async def forget() -> None:
            for number in self._by_prompt.pop(prompt.prompt_id, ()):
                self._parts.pop(number, None)

        return self._completions.thread.submit(forget())

    async def _turn(self, request: TurnRequest, sampling: SamplingConfig) -> TurnResult:
        numbers = [int(one) for one in request.token_ids_T if one != _UNKNOWN_ID]
        known = self._by_prompt.setdefault(prompt_of(request.conversation), set())
        known.update(numbers)
        parts = [self._parts[number] for number in numbers]
        within_s = min(request.timeout_s, _MAX_TURN_S)
        try:
            reply = await self._completions.complete(
                self._drop_old_thinking([message for part in parts for message in part.messages]),
                [tool.as_json() for tool in parts[0].tools],
                sampling,
                max_tokens=request.max_tokens,
                thinking=parts[0].thinking,
                within_s=within_s,
            )
        except TimeoutError:
            return _turn_result((), "deadline", within_s)
        if isinstance(reply, str):
            raise _TurnLost(reply)
        if reply.reasoning:
            self._reasoning_field = reply.reasoning_field
        number = next(self._numbers)
        parsed = Parsed(
            content=reply.content,
            reasoning=reply.reasoning,
            closed=not reply.cut,
            calls=tuple(
                parse_call(f"call_{number}_{n}", *call) for n, call in enumerate(reply.calls)
            ),
        )
        self._parts[number] = _Part(
            messages=(_to_endpoint_format(message_of(parsed)),), reply=parsed
        )
        known.add(number)
        ids = [number, *[_UNKNOWN_ID] * (min(reply.tokens, request.max_tokens) - 1)]
        return _turn_result(ids, "length" if reply.cut else "stop", reply.seconds)

    def _drop_old_thinking(self, messages: Sequence[Message]) -> list[Message]:
        # Later thinking is kept, because some endpoints reject tool results without it.
        names = {_THINKING: self._reasoning_field}
        return [
            {names.get(key, key): value for key, value in message.items()}
            for message in drop_old_thinking(messages)
        ]

    def _add_part(self, part: _Part, shown: Sequence[Mapping[str, Any]]) -> list[int]:
        number = next(self._numbers)
        self._parts[number] = part
        count = len(json.dumps(list(shown), ensure_ascii=False)) // _CHARACTERS_PER_TOKEN
        return [number, *[_UNKNOWN_ID] * count]


def _turn_result(ids: Sequence[int], finish: Any, seconds: float) -> TurnResult:
    return TurnResult(
        token_ids_R=np.array(ids, np.int32),
        logp_old_R=np.zeros(len(ids), np.float32),
        version_R=np.zeros(len(ids), np.int32),
        finish_reason=finish,
        sampling_s=seconds,
    )


def _to_endpoint_format(message: Message) -> Message:
    sent = {key: message[key] for key in ("role", "content", "tool_call_id") if key in message}
    sent |= {key: message[key] for key in ("tool_calls", _THINKING) if message.get(key)}
    return openai_message(sent)
