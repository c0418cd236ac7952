"""Formats a turn as an OpenAI response, either complete or as a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.agents.conversation import message_of
from keel.agents.endpoint.requests import replace_surrogates
from keel.rl.turns import Message, Parsed
from keel.rl.types import FinishReason

_CHUNK = 24
"""Number of characters in each chunk of a stream."""
MODEL = "policy"
"""The only model in the list of models. Requests may use any other name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A recorded turn in the form in which the client gets it."""

    reply_id: str
    message: Message
    """The message for the client. Call arguments are still objects, not JSON strings."""
    ended: FinishReason
    """`stop`, or the limit that cut the turn."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def finish_reason(self) -> str:
        if self.ended != "stop":
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"


def client_message(parsed: Parsed, *, cut: bool, may_call: bool) -> dict[str, Any]:
    """Return a parsed turn as the message that the client gets.

    Calls are removed if `may_call` is False or the turn was cut, because clients run calls without
    looking at the finish reason.
    """
    message = replace_surrogates(message_of(parsed))
    if cut or not may_call:
        message.pop("tool_calls", None)
    return message


def completion(reply: Reply, model: str) -> dict[str, Any]:
    """Return the response to a non-streaming request."""
    calls = _calls(reply.message)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.message["content"] or (None if calls else ""),
        "refusal": None,
    }
    if reply.message.get("reasoning_content"):
        message["reasoning_content"] = reply.message["reasoning_content"]
    if calls:
        message["tool_calls"] = calls
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": reply.finish_reason,
    }
    head = _head(reply, model, "chat.completion")
    return {**head, "choices": [choice], "usage": _usage(reply)}


def events(reply: Reply, model: str, *, include_usage: bool) -> Iterator[bytes]:
    """Yield the server-sent events for a streaming request, ending with `[DONE]`."""
    head = _head(reply, model, "chat.completion.chunk")
    if include_usage:
        head["usage"] = None

    def event(choices: list[dict[str, Any]], **fields: Any) -> bytes:
        return b"data: " + json.dumps({**head, "choices": choices, **fields}).encode() + b"\n\n"

    def choice(delta: Mapping[str, Any], finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0, "delta": dict(delta), "logprobs": None, "finish_reason": finish_reason}

    for delta in _deltas(reply.message):
        yield event([choice(delta, None)])
    yield event([choice({}, reply.finish_reason)])
    if include_usage:
        yield event([], usage=_usage(reply))
    yield b"data: [DONE]\n\n"


def model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "keel"}


def _deltas(message: Message) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": "" if message["content"] else None}
    for piece in _pieces(message.get("reasoning_content") or ""):
        yield {"reasoning_content": piece}
    for piece in _pieces(message["content"]):
        yield {"content": piece}
    for index, call in enumerate(_calls(message)):
        function = {"name": call["function"]["name"], "arguments": ""}
        yield {"tool_calls": [{**call, "index": index, "function": function}]}
        for piece in _pieces(call["function"]["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _calls(message: Message) -> Sequence[dict[str, Any]]:
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in calls
    ]


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), _CHUNK):
        yield text[start : start + _CHUNK]


def _head(reply: Reply, model: str, kind: str) -> dict[str, Any]:
    created = int(time.time())
    return {"id": reply.reply_id, "object": kind, "created": created, "model": model or MODEL}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }
