"""What to leave out when a context has filled its window: DeepSeek-V3.2 (2025), section 4.4.

At 80 % of the window the conversation is rewritten and goes on in a new segment. The opening always
stays, a call always stays with its results, and there is a limit to how often it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from keel.rl.turns import Message

FULL = 0.8
"""Share of the window at which a context is rewritten."""
Method = Literal["none", "summary", "discard-75", "discard-all"]
_SHARES = {"discard-75": 0.75, "discard-all": 1.0}
"""Share of the tool-call history that goes."""

ASK_FOR_SUMMARY = (
    "The conversation is about to outgrow its window. Write down what is needed to go on without "
    "it: what was asked, what was done and found out, with names and figures, and what is left to "
    "do. Call no tool."
)
SUMMARY = "What was done so far, in your own words:\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """The context to go on from."""

    messages: tuple[Message, ...]
    """With the opening."""
    added: tuple[Message, ...] = ()
    """Those of them that stood nowhere before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskFirst:
    """The policy is to say something first; `rewritten_by` makes the rewrite of its words."""

    messages: tuple[Message, ...]
    """Put to the policy after the present context, or after that of `before`."""
    before: Rewrite | None = None
    """What to do first, where the present context leaves no room for the policy's words: a tool's
    result may have been longer than what was left of the window."""

    instead: Rewrite
    """The context to go on from where the policy says nothing: it was cut off while it thought."""

    def rewritten_by(self, opening: Sequence[Message], words: str) -> Rewrite:
        """The opening, and the policy's summary as the user's message."""
        if not words.strip():
            return self.instead
        summary: Message = {"role": "user", "content": SUMMARY + words.strip()}
        return Rewrite(messages=(*opening, summary), added=(summary,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextManager:
    """Decides when and how. Keeps nothing: how often it was done is given to it."""

    method: Method
    window: int
    """Tokens of a context with what is sampled after it."""
    most: int
    """Rewrites of one trajectory at most; it then ends at its window."""
    summary_tokens: int = 1024
    """Room for the policy's summary and for what asks for it."""

    def __post_init__(self) -> None:
        if self.method not in (known := ("none", "summary", *_SHARES)):
            raise ValueError(
                f"context method {self.method!r} is not known; choose among {', '.join(known)}"
            )
        if self.window < 1 or self.most < 0 or self.summary_tokens < 1:
            raise ValueError(
                f"a window of {self.window} tokens, {self.most} rewrites, {self.summary_tokens} "
                "tokens for a summary: each must be at least 1 (rewrites at least 0)"
            )

    def due(self, tokens: int, *, rewrites: int) -> bool:
        """Whether a context of so many tokens is rewritten before the next turn."""
        return self.method != "none" and rewrites < self.most and tokens >= FULL * self.window

    def rewrite(
        self, opening: Sequence[Message], view: Sequence[Message], *, tokens: int, rewrites: int
    ) -> Rewrite | AskFirst | None:
        """What to do before the next turn. `view`: what the context of `tokens` shows, the opening
        first. None: nothing is due, or nothing is left that could go."""
        if not self.due(tokens, rewrites=rewrites):
            return None
        steps = steps_of(view[len(opening) :])
        fits = tokens + self.summary_tokens <= self.window
        shorter: Rewrite | None = None
        if any(step[0].get("tool_calls") for step in steps):
            kept = _discard(steps, _SHARES.get(self.method, 0.75))
            shorter = Rewrite(messages=(*opening, *(m for step in kept for m in step)))
        if self.method != "summary":
            return shorter
        if not steps or (not fits and shorter is None):
            return None
        question: Message = {"role": "user", "content": ASK_FOR_SUMMARY}
        return AskFirst(
            messages=(question,),
            before=None if fits else shorter,
            instead=shorter or Rewrite(messages=tuple(view)),
        )


def steps_of(messages: Sequence[Message]) -> list[list[Message]]:
    """Messages in the pieces that stay or go as one: an assistant's with all results that answer
    it, and every other message alone."""
    steps: list[list[Message]] = []
    for message in messages:
        if message["role"] == "tool" and steps and steps[-1][0]["role"] == "assistant":
            steps[-1].append(message)
        else:
            steps.append([message])
    return steps


def _discard(steps: list[list[Message]], share: float) -> list[list[Message]]:
    """Without the first of the tool-call history, `share` of it rounded up; the rest stays."""
    calls = [i for i, step in enumerate(steps) if step[0].get("tool_calls")]
    gone = set(calls[: ceil(len(calls) * share)])
    return [step for i, step in enumerate(steps) if i not in gone]
