"""Token, time and tool-call limits for a trajectory, and how much of them it has used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from keel.rl.turns import TurnResult
from keel.rl.types import FinishReason, Usage

CHARACTERS_PER_TOKEN = 16
"""Upper bound on the average characters per token of a long text; prose has about 4."""
_SHORT_TEXT = 1 << 16
"""Texts up to this many characters are always tokenized, which takes a tenth of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limits for one trajectory."""

    turns: int
    turn_tokens: int
    """Maximum number of tokens sampled in one turn. Only an agent program continues a cut turn."""
    tokens: int
    window: int
    """Maximum number of tokens in a context, including the sampled ones."""
    timeout_s: float = inf
    """Time limit in seconds for turns, cancelled ones included, for tools and for the program
    between turns."""
    call_s: float = 60.0
    calls: float = inf
    """Maximum number of tool calls that are run. Later calls return an error."""

    @property
    def characters(self) -> int:
        """A longer text is assumed not to fit the window: tokenizing it would block all other
        episodes."""
        return max(CHARACTERS_PER_TOKEN * self.window, _SHORT_TEXT)

    def truncate(self, text: str) -> str:
        """Truncate text to `characters` characters and append a note on how many were removed."""
        excess = len(text) - self.characters
        return text if excess <= 0 else f"{text[:-excess]}\n[{excess} characters left out]"

    def refusal(self, calls: int) -> str:
        """Return an error message if no call may run after `calls` calls, or ""."""
        if calls < self.calls:
            return ""
        return f"Nothing was run: {self.calls} calls have been, and no more will be."

    def remaining_s(self, usage: Usage) -> float:
        return self.timeout_s - usage.sampling_s - usage.tools_s

    def room(self, usage: Usage, *, context: int, sampled: int) -> tuple[FinishReason, int]:
        """Return the limit that the next turn will reach first, and how many tokens the turn may
        sample. The limit is already reached if that number is below 1."""
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
    """Add a turn. An earlier turn had already processed `repeated` tokens of its context."""
    return replace(
        usage,
        turns=usage.turns + 1,
        repeated_tokens=usage.repeated_tokens + repeated,
        cached_tokens=usage.cached_tokens + min(result.cached_tokens, repeated),
        sampling_s=usage.sampling_s + result.sampling_s,
    )
