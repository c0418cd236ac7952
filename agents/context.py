"""Shortens the context when a conversation fills its window, as in DeepSeek-V3.2 (2025), section
4.4. The opening messages are always kept. A tool call is kept or removed together with its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from keel.rl.turns import Message

_FULL = 0.8
"""The context is rewritten once it fills this fraction of the window."""
Method = Literal["none", "summary", "discard-75", "discard-all"]
_SHARES = {"discard-75": 0.75, "discard-all": 1.0}
"""The fraction of tool calls that each method removes from the context."""

ASK_FOR_SUMMARY = (
    "The conversation is about to outgrow its window. Write down what is needed to go on without "
    "it: what was asked, what was done and found out, with names and figures, and what is left to "
    "do. Call no tool."
)
SUMMARY = "What was done so far, in your own words:\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """A new context that replaces the current one."""

    messages: tuple[Message, ...]
    added: tuple[Message, ...] = ()
    """The messages in the new context that have not yet appeared in the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskFirst:
    """A question to ask the policy before the context is rewritten."""

    question: str
    """The question to send, after `before` has been applied if it is set."""
    before: Rewrite | None = None
    """A rewrite to apply first, if the current context leaves no room for an answer."""
    fallback: Rewrite
    """The rewrite to use if the answer is empty, because the turn was truncated while thinking."""

    def rewritten_by(self, opening: Sequence[Message], answer: str) -> Rewrite:
        """Return a rewrite that keeps only the opening and the policy's answer, or `fallback` if
        the answer is empty."""
        if not answer.strip():
            return self.fallback
        summary: Message = {"role": "user", "content": SUMMARY + answer.strip()}
        return Rewrite(messages=(*opening, summary), added=(summary,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextManager:
    """Decides when and how to rewrite a context. It is stateless."""

    method: Method
    window: int
    most: int
    """Maximum number of rewrites, or 0 for no limit. After the last one, the trajectory ends when
    its window is full."""
    summary_tokens: int = 1024
    """Number of tokens reserved for the question and the policy's summary."""

    def rewrite(
        self, opening: Sequence[Message], view: Sequence[Message], *, tokens: int, rewrites: int
    ) -> Rewrite | AskFirst | None:
        """Decide how to rewrite the current context `view`, which has `tokens` tokens, before the
        next turn. Returns None if no rewrite is needed or nothing can be removed."""
        spent = 0 < self.most <= rewrites
        if self.method == "none" or spent or tokens < _FULL * self.window:
            return None
        steps: list[list[Message]] = []  # an assistant message with its results, or another message
        for message in view[len(opening) :]:
            if message["role"] == "tool" and steps and steps[-1][0]["role"] == "assistant":
                steps[-1].append(message)
            else:
                steps.append([message])
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
        return AskFirst(
            question=ASK_FOR_SUMMARY,
            before=None if fits else shorter,
            fallback=shorter or Rewrite(messages=tuple(view)),
        )
