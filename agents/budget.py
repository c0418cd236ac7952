"""Limits for a trajectory, and its usage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from keel.rl.turns import TurnResult
from keel.rl.types import FinishReason, Usage

CHARACTERS_PER_TOKEN = 16
"""Upper bound on the average number of characters per token in a long text. Prose and code have
about 4."""
_SHORT_TEXT = 1 << 16
"""Texts up to this many characters are always tokenized, which takes a tenth of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limits for one trajectory."""

    turns: int
    turn_tokens: int
    """Limit on the tokens sampled in one turn. An episode that Keel drives ends when a turn is cut
    there. A program sees the finish reason `length`."""
    tokens: int
    """Limit on the tokens sampled in all turns."""
    window: int
    """Limit on the tokens of a context, including the sampled ones."""
    timeout_s: float = inf
    """Limit in seconds on the time spent in the engine and in tools. The time that a program spends
    between turns counts as tool time. A turn that the program cancelled counts in full."""
    call_s: float = 60.0
    """Time limit in seconds for each call to an environment's tool."""
    calls: float = inf
    """How many tool calls are run. Later calls get an error."""

    @property
    def characters(self) -> int:
        """Length above which a text is assumed not to fit the window. The length is checked first
        because tokenizing a large text would block all other trajectories for seconds per MiB."""
        return max(CHARACTERS_PER_TOKEN * self.window, _SHORT_TEXT)

    def truncate(self, text: str) -> str:
        """Cut a text to `characters` and append a note about how many were removed."""
        excess = len(text) - self.characters
        return text if excess <= 0 else f"{text[:-excess]}\n[{excess} characters left out]"

    def refusal(self, calls: int) -> str:
        """Return the error for a call that follows `calls` others, or "" if it may run."""
        if calls < self.calls:
            return ""
        return f"Nothing was run: {self.calls} calls have been, and no more will be."

    def remaining_s(self, usage: Usage) -> float:
        return self.timeout_s - usage.sampling_s - usage.tools_s

    def room(self, usage: Usage, *, context: int, sampled: int) -> tuple[FinishReason, int]:
        """Return the limit that the next turn will reach first, and how many tokens it may sample.
        If that number is below 1, the limit has been reached already. `context` is the number of
        tokens in the context, and `sampled` the number sampled in all turns."""
        if usage.turns >= self.turns:
            return "turns", 0
        if self.remaining_s(usage) <= 0:
            return "deadline", 0
        limits: dict[FinishReason, int] = {
            "length": min(self.tokens - sampled, self.turn_tokens),
            "window": self.window - context,
        }
        nearest = min(limits, key=lambda name: limits[name])
        return nearest, limits[nearest]


def with_turn(usage: Usage, result: TurnResult, *, repeated: int) -> Usage:
    """Return the usage after a turn. `repeated` is the number of context tokens that an earlier
    turn had already processed."""
    return replace(
        usage,
        turns=usage.turns + 1,
        repeated_tokens=usage.repeated_tokens + repeated,
        cached_tokens=usage.cached_tokens + min(result.cached_tokens, repeated),
        sampling_s=usage.sampling_s + result.sampling_s,
    )
