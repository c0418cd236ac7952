"""What an endpoint's reply says, whatever its shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REASONING = ("reasoning_content", "reasoning")
"""Where endpoints put it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A chat completion."""

    content: str
    reasoning: str
    reasoning_field: str
    """Of `REASONING`, where there is some."""
    calls: tuple[tuple[str, str], ...]
    """Name and arguments of each, as they were written."""
    tokens: int
    cut: bool
    """By its limit of tokens."""
    seconds: float
    """That the endpoint took."""


def read(body: Any, *, seconds: float) -> Said | str:
    """Or why it is none."""
    try:
        choice, usage = body["choices"][0], body.get("usage")
        message = choice["message"]
        thoughts = {key: str(message[key]) for key in REASONING if message.get(key)}
        field, reasoning = next(iter(thoughts.items()), (REASONING[0], ""))
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [(str(one["name"]), str(one.get("arguments") or "{}")) for one in functions]
        content, cut = str(message.get("content") or ""), choice.get("finish_reason") == "length"
    except (LookupError, TypeError, AttributeError) as error:
        return f"the endpoint's reply is no chat completion: {error!r}"
    tokens: Any = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    if not isinstance(tokens, int) or tokens < 1:
        return "the endpoint does not count the tokens of its completions"
    return Said(
        content=content,
        reasoning=reasoning,
        reasoning_field=field,
        calls=tuple(calls),
        tokens=tokens,
        cut=cut,
        seconds=seconds,
    )
