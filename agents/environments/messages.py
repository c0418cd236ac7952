"""Messages of a task with words of its environment's before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def with_instructions(messages: Sequence[Mapping[str, Any]], *words: str) -> list[dict[str, Any]]:
    """`messages` with `words` in a system message, after what one of theirs says. Not in the
    question: what language an answer is to be in is read from that."""
    if not any(words):
        return [dict(message) for message in messages]
    first, *rest = messages = [dict(message) for message in messages]
    if first.get("role") != "system":
        first, rest = {"role": "system", "content": ""}, messages
    said = "\n\n".join(filter(None, (str(first["content"]), *words)))
    return [{**first, "content": said}, *rest]
