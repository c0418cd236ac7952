"""Environments shipped with Keel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def add_instructions(
    messages: Sequence[Mapping[str, Any]], *instructions: str
) -> list[dict[str, Any]]:
    """Add instructions to the system message. The question stays unchanged, because its language
    determines the language of the answer."""
    if not any(instructions):
        return [dict(message) for message in messages]
    first, *rest = messages = [dict(message) for message in messages]
    if first.get("role") != "system":
        first, rest = {"role": "system", "content": ""}, messages
    content = "\n\n".join(filter(None, (str(first["content"]), *instructions)))
    return [{**first, "content": content}, *rest]
