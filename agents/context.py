"""Context management when a conversation fills its window: DeepSeek-V3.2 (2025), section 4.4.

At 80 % of the window the conversation is rewritten and continues in a new segment. The opening is
kept, a call is kept or removed together with its results, and the number of rewrites is limited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from keel.rl.turns import Message

_FULL = 0.8
"""Fraction of the window that triggers a rewrite."""
Method = Literal["none", "summary", "discard-75", "discard-all"]
_SHARES = {"discard-75": 0.75, "discard-all": 1.0}
"""Fraction of the tool calls to remove."""

ASK_FOR_SUMMARY = (
    "The conversation is about to outgrow its window. Write down what is needed to go on without "
    "it: what was asked, what was done and found out, with names and figures, and what is left to "
    "do. Call no tool."
)
SUMMARY = "What was done so far, in your own words:\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """A new context."""

    messages: tuple[Message, ...]
    """Includes the opening."""
    added: tuple[Message, ...] = ()
    """Messages that are new to the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskFirst:
    """A question that the policy answers before the rewrite."""

    messages: tuple[Message, ...]
    """Messages appended to the current context, or to the context of `before`."""
    before: Rewrite | None = None
    """Applied first if the current context leaves no room for the answer: a long tool result may
    have filled it."""
    fallback: Rewrite
    """Used if the answer is empty because it was cut during the thinking."""

    def rewritten_by(self, opening: Sequence[Message], answer: str) -> Rewrite:
        """Return the opening followed by the policy's summary as a user message."""
        if not answer.strip():
            return self.fallback
        summary: Message = {"role": "user", "content": SUMMARY + answer.strip()}
        return Rewrite(messages=(*opening, summary), added=(summary,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextManager:
    """Decides when and how to rewrite. Stateless: the caller counts the rewrites."""

    method: Method
    window: int
    """Tokens of a context, including those sampled after it."""
    most: int
    """Maximum number of rewrites; then the trajectory ends at its window."""
    summary_tokens: int = 1024
    """Tokens reserved for the question and the policy's summary."""

    def __post_init__(self) -> None:
        if self.method not in (known := ("none", "summary", *_SHARES)):
            raise ValueError(f"context method {self.method!r} is unknown; use {', '.join(known)}")
        if self.window < 1 or self.most < 0 or self.summary_tokens < 1:
            raise ValueError(
                f"context: window = {self.window} and summary_tokens = {self.summary_tokens} must "
                f"be at least 1, most = {self.most} at least 0"
            )

    def due(self, tokens: int, *, rewrites: int) -> bool:
        """Return True if a context of `tokens` must be rewritten before the next turn."""
        return self.method != "none" and rewrites < self.most and tokens >= _FULL * self.window

    def rewrite(
        self, opening: Sequence[Message], view: Sequence[Message], *, tokens: int, rewrites: int
    ) -> Rewrite | AskFirst | None:
        """Return what to do before the next turn; None if no rewrite is due or nothing can be
        removed. view: messages in the context of `tokens`, beginning with the opening."""
        if not self.due(tokens, rewrites=rewrites):
            return None
        steps = _steps(view[len(opening) :])
        fits = tokens + self.summary_tokens <= self.window
        calls = [i for i, step in enumerate(steps) if step[0].get("tool_calls")]
        shorter: Rewrite | None = None
        if calls:
            removed = set(calls[: ceil(len(calls) * _SHARES.get(self.method, 0.75))])
            rest = (m for i, step in enumerate(steps) if i not in removed for m in step)
            shorter = Rewrite(messages=(*opening, *rest))
        if self.method != "summary":
            return shorter
        if not steps or (not fits and shorter is None):
            return None
        question: Message = {"role": "user", "content": ASK_FOR_SUMMARY}
        return AskFirst(
            messages=(question,),
            before=None if fits else shorter,
            fallback=shorter or Rewrite(messages=tuple(view)),
        )


def _steps(messages: Sequence[Message]) -> list[list[Message]]:
    """Group each assistant message with its tool results; every other message stands alone."""
    steps: list[list[Message]] = []
    for message in messages:
        if message["role"] == "tool" and steps and steps[-1][0]["role"] == "assistant":
            steps[-1].append(message)
        else:
            steps.append([message])
    return steps
