"""A model behind an endpoint as episodes know an engine: turn by turn.

An endpoint says texts, so the ids of such a conversation are none of a tokenizer's: one stands for
each part of it (an opening, a reply, what answered it), and the others are there to be counted.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from keel.configs.schema import SamplingConfig
from keel.rl import strict_json
from keel.rl.turns import (
    MALFORMED,
    Malformed,
    Message,
    Parsed,
    ToolCall,
    ToolSpec,
    TurnRequest,
    TurnResult,
    prompt_of,
)
from keel.rl.types import Prompt, Purpose
from keel.rollout.endpoint import UNKNOWN, EndpointCompletions
from keel.rollout.endpoint_reply import REASONING, Said

CHARACTERS_PER_TOKEN = 4
"""About, of what nobody counts: openings and the results of tools."""
MOST_SAID = 300
LONGEST_S = 86_400.0
"""Of a turn without a deadline."""
THINKING = REASONING[0]
"""Keel's own key of it."""


class NoTurn(OSError):
    """The endpoint did not give it: its episode is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Of a conversation."""

    messages: tuple[Message, ...]
    """As an endpoint has them, all with their thinking."""
    tools: tuple[ToolSpec, ...] = ()
    thinking: bool = False
    said: Parsed | None = None
    """Of a reply."""


class EndpointTurns:
    """Implements `keel.rl.turns.Chat`, and samples."""

    stop_ids: tuple[int, ...] = ()

    def __init__(
        self, completions: EndpointCompletions, sampling: Mapping[Purpose, SamplingConfig]
    ) -> None:
        self._completions, self._sampling = completions, sampling
        self._parts: dict[int, _Part] = {}
        self._of: dict[str, set[int]] = {}
        """Parts of the conversations about each prompt; touched on the completions' loop alone."""
        self._numbers = itertools.count()
        self._reasoning_field = THINKING
        """As the endpoint calls it."""

    def opening(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, thinking: bool
    ) -> list[int]:
        wire = tuple(map(_as_sent, messages))
        part = _Part(messages=wire, tools=tuple(tools), thinking=thinking)
        return self._added(part, [*self._shown(wire), *(tool.as_json() for tool in tools)])

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], *, thinking: bool
    ) -> list[int]:
        wire = tuple(map(_as_sent, messages))
        return [*ids, *self._added(_Part(messages=wire), wire)]

    def parse(
        self,
        sampled: Sequence[int],
        tools: Sequence[ToolSpec],
        *,
        thinking: bool,
        turn: int,
        inside: bool = False,
    ) -> Parsed:
        said = self._parts[sampled[0]].said
        assert said is not None
        return said

    def turn(self, request: TurnRequest, purpose: Purpose) -> Future[TurnResult]:
        """The future fails with NoTurn, or as `EndpointCompletions.submit`."""
        return self._completions.later(self._turn(request, self._sampling[purpose]))

    def forget(self, prompt: Prompt) -> Future[None]:
        """The conversations about it, which are over."""
        return self._completions.later(self._forget(prompt.prompt_id))

    async def _forget(self, prompt_id: str) -> None:
        for number in self._of.pop(prompt_id, ()):
            self._parts.pop(number, None)

    async def _turn(self, request: TurnRequest, sampling: SamplingConfig) -> TurnResult:
        numbers = [int(one) for one in request.token_ids_T if one != UNKNOWN]
        mine = self._of.setdefault(prompt_of(request.conversation), set())
        mine.update(numbers)
        parts = [self._parts[number] for number in numbers]
        within_s = min(request.timeout_s, LONGEST_S)
        try:
            said = await self._completions.asked(
                self._shown([message for part in parts for message in part.messages]),
                [tool.as_json() for tool in parts[0].tools],
                sampling,
                max_tokens=request.max_tokens,
                thinking=parts[0].thinking,
                within_s=within_s,
            )
        except TimeoutError:
            return _result((), "deadline", within_s)
        if isinstance(said, str):
            raise NoTurn(said)
        if said.reasoning:
            self._reasoning_field = said.reasoning_field
        number = next(self._numbers)
        parsed = _parsed(said, f"call_{number}")
        self._parts[number] = _Part(messages=(_spoken(parsed),), said=parsed)
        mine.add(number)
        ids = [number, *[UNKNOWN] * (min(said.tokens, request.max_tokens) - 1)]
        return _result(ids, "length" if said.cut else "stop", said.seconds)

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """With the thinking after the user's last message alone, as templates show it. Some
        endpoints refuse tools' results without it."""
        users = [n for n, message in enumerate(messages) if message["role"] == "user"]
        last = users[-1] if users else -1
        shown: list[Message] = []
        for n, message in enumerate(messages):
            rest = dict(message)
            thought = rest.pop(THINKING, "")
            shown.append({**rest, self._reasoning_field: thought} if thought and n > last else rest)
        return shown

    def _added(self, part: _Part, shown: Sequence[Mapping[str, Any]]) -> list[int]:
        number = next(self._numbers)
        self._parts[number] = part
        count = len(json.dumps(list(shown), ensure_ascii=False)) // CHARACTERS_PER_TOKEN
        return [number, *[UNKNOWN] * count]


def _result(ids: Sequence[int], finish: Any, seconds: float) -> TurnResult:
    return TurnResult(
        token_ids_N=np.array(ids, np.int32),
        logp_old_N=np.zeros(len(ids), np.float32),
        version_N=np.zeros(len(ids), np.int32),
        finish_reason=finish,
        sampling_s=seconds,
    )


def _parsed(said: Said, name: str) -> Parsed:
    """name: unique in the conversation, its contexts before a rewrite included."""
    return Parsed(
        content=said.content,
        reasoning=said.reasoning,
        closed=not said.cut,
        calls=tuple(_call(*call, f"{name}_{n}") for n, call in enumerate(said.calls)),
    )


def _call(tool: str, text: str, call_id: str) -> ToolCall | Malformed:
    try:
        arguments = strict_json.load(text)
        if not isinstance(arguments, dict):
            raise ValueError("the arguments are no JSON object")
    except ValueError as error:
        return Malformed(call_id=call_id, text=text[:MOST_SAID], why=str(error))
    return ToolCall(call_id=call_id, name=tool, arguments=cast(dict[str, Any], arguments))


def _spoken(said: Parsed) -> Message:
    """A reply as the next request has it."""
    calls = [
        (call.call_id, call.name, call.arguments)
        if isinstance(call, ToolCall)
        else (call.call_id, MALFORMED, {"text": call.text})
        for call in said.calls
    ]
    wanted = [{"id": n, "function": {"name": name, "arguments": a}} for n, name, a in calls]
    message = {"role": "assistant", "content": said.content, THINKING: said.reasoning}
    return _as_sent({**message, "tool_calls": wanted})


def _as_sent(message: Message) -> Message:
    """Keel's form has more keys, and arguments as they are; an endpoint's has them as text."""
    keys = ("role", "content", THINKING, "tool_call_id")
    sent = {key: message[key] for key in keys if key in message}
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(dict(call["function"]["arguments"])),
                },
            }
            for call in calls
        ]
    return sent
