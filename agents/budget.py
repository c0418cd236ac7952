"""Token, time and tool-call limits for a trajectory."""

from dataclasses import dataclass, replace
from math import inf

from keel.rl.turns import TurnResult
from keel.rl.types import FinishReason, Usage

CHARACTERS_PER_TOKEN = 16
"""Upper bound on the average number of characters per token in a long text. Prose has about 4."""
_SHORT_TEXT = 1 << 16
"""Texts up to this many characters are always tokenized, which takes at most 0.1 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    turns: int
    turn_tokens: int
    """Maximum number of tokens sampled per turn. A truncated turn is continued only if an agent
    program requests it."""
    tokens: int
    window: int
    timeout_s: float = inf
    """Time limit for the trajectory in seconds, including cancelled turns, tool calls, and the time
    that a program spends between turns."""
    call_s: float = 60.0
    calls: float = inf
    """Maximum number of tool calls. Further calls return an error."""

    @property
    def characters(self) -> int:
        """Maximum number of characters to tokenize. Longer texts are assumed to exceed the context
        window, because tokenizing them would block all other episodes."""
        return max(CHARACTERS_PER_TOKEN * self.window, _SHORT_TEXT)

    def truncate(self, text: str) -> str:
        excess = len(text) - self.characters
        return text if excess <= 0 else f"{text[:-excess]}\n[{excess} characters left out]"

    def refusal(self, calls: int) -> str:
        if calls < self.calls:
            return ""
        return f"Nothing was run: {self.calls} calls have been, and no more will be."

    def remaining_s(self, usage: Usage) -> float:
        return self.timeout_s - usage.sampling_s - usage.tools_s

    def turn_limit(self, usage: Usage, *, context: int, sampled: int) -> tuple[FinishReason, int]:
        """Return the limit that the next turn will reach first, and the number of tokens left
        before it is reached. A number below 1 means that it has already been reached."""
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


def add_turn(usage: Usage, result: TurnResult, *, repeated: int) -> Usage:
    """Return a copy of `usage` that includes one more turn. `repeated` is the number of context
    tokens that an earlier turn already processed."""
    return replace(
        usage,
        turns=usage.turns + 1,
        repeated_tokens=usage.repeated_tokens + repeated,
        cached_tokens=usage.cached_tokens + min(result.cached_tokens, repeated),
        sampling_s=usage.sampling_s + result.sampling_s,
    )
