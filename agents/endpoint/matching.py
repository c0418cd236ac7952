"""Keys that are equal for equal messages, whatever a client does to one that it sends back.

Clients leave the thinking out, order keys anew, write arguments' JSON in another way, put None for
an empty content or a list of parts for a text, add names, and add or strip white space around the
assistant's words. (Contents and arguments are brought into one form by
`keel.agents.endpoint.requests` already.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

from keel.rl.turns import Message, ToolSpec

START = ""
"""The key of no messages at all."""


def chain(messages: Sequence[Message]) -> list[str]:
    """Keys of all prefixes: entry i is of the first i messages."""
    keys = [START]
    for message in messages:
        keys.append(link(keys[-1], message))
    return keys


def link(key: str, message: Message) -> str:
    """Return the key of the messages of `key` with one more after them."""
    is_policys = message["role"] == "assistant"
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    same = [
        message["role"],
        message["content"].strip() if is_policys else message["content"],
        [
            [call["id"], call["function"]["name"], _number_free(call["function"]["arguments"])]
            for call in calls
        ],
        message.get("tool_call_id"),
    ]
    return _hash(key + json.dumps(same, sort_keys=True))


def key_of_tools(tools: Sequence[ToolSpec]) -> str:
    return _hash(json.dumps([tool.as_json() for tool in tools], sort_keys=True))


def _number_free(value: Any) -> Any:
    """1.0 is 1 to many a client."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {k: _number_free(item) for k, item in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list):
        return [_number_free(item) for item in cast(list[Any], value)]
    return value


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
