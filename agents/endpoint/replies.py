"""Formats a turn as an OpenAI response, either as a whole or as a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from keel.rl.turns import Message
from keel.rl.types import FinishReason

MODEL = "policy"
"""The model name that the endpoint lists. Requests may use any other name as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A recorded turn in the form that the client receives."""

    reply_id: str
    request_key: str
    """Key of the request. Requests have the same key if their messages, tools and limits are
    equal."""
    message: Message
    """The message for the client. The arguments of calls are still objects, not JSON strings."""
    ended: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def finish_reason(self) -> str:
        if self.ended != "stop":
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"


def completion(reply: Reply, model: str) -> dict[str, Any]:
    message = _openai_message(reply.message)
    choice = {
        "index": 0,
        "message": {**message, "refusal": None},
        "logprobs": None,
        "finish_reason": reply.finish_reason,
    }
    head = _head(reply, model, "chat.completion")
    return {**head, "choices": [choice], "usage": _usage(reply)}


def events(reply: Reply, model: str, *, include_usage: bool) -> Iterator[bytes]:
    """Yield the server-sent events of a stream. A single event contains the whole message."""
    head = _head(reply, model, "chat.completion.chunk")
    if include_usage:
        head["usage"] = None

    def event(choices: list[dict[str, Any]], **fields: Any) -> bytes:
        return b"data: " + json.dumps({**head, "choices": choices, **fields}).encode() + b"\n\n"

    delta = _openai_message(reply.message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    yield event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])
    ended = reply.finish_reason
    yield event([{"index": 0, "delta": {}, "logprobs": None, "finish_reason": ended}])
    if include_usage:
        yield event([], usage=_usage(reply))
    yield b"data: [DONE]\n\n"


def model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "keel"}


def _openai_message(message: Message) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    for call in message.get("tool_calls", ()):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    fields = {**message, "content": message["content"] or (None if calls else "")}
    return {**fields, "tool_calls": calls} if calls else fields


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
