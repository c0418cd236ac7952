"""Limits of a trajectory and their accounting, whether Keel or a program drives it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from keel.rl.turns import TurnResult
from keel.rl.types import FinishReason, Usage

CHARACTERS_PER_TOKEN = 16
"""Upper bound on a long text's average; prose and code have about 4."""
_SHORT_TEXT = 1 << 16
"""Characters that are always tokenized, which takes a tenth of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one trajectory."""

    turns: int
    turn_tokens: int
    """Sampled tokens per turn. A turn cut there ends an episode that Keel drives; a program sees
    the finish reason `length`."""
    tokens: int
    """Sampled tokens in all turns."""
    window: int
    """Tokens of a context, including those sampled after it."""
    timeout_s: float = inf
    """Seconds of engine time and tool time, or of a program's own time between turns. A turn that a
    program cancelled counts in full."""
    call_s: float = 60.0
    """Seconds per call of an environment's tool."""
    calls: float = inf
    """Tool calls that are run; later ones get an error."""

    def __post_init__(self) -> None:
        for name in ("turns", "turn_tokens", "tokens", "window", "timeout_s", "call_s", "calls"):
            if not getattr(self, name) > 0:
                raise ValueError(f"budget: {name} = {getattr(self, name)} must be positive")

    @property
    def characters(self) -> int:
        """Length above which a text cannot fit the window. Checking by tokenization would block
        all other trajectories for seconds per MiB."""
        return max(CHARACTERS_PER_TOKEN * self.window, _SHORT_TEXT)

    def truncate(self, text: str) -> str:
        """Cut a text to `characters`, with a note of how many were removed."""
        excess = len(text) - self.characters
        return text if excess <= 0 else f"{text[:-excess]}\n[{excess} characters left out]"

    def refusal(self, calls: int) -> str:
        """Return the error for a call after `calls` others; "" if it may run."""
        if calls < self.calls:
            return ""
        return f"Nothing was run: {self.calls} calls have been, and no more will be."

    def remaining_s(self, usage: Usage) -> float:
        return self.timeout_s - usage.sampling_s - usage.tools_s

    def room(self, usage: Usage, *, context: int, sampled: int) -> tuple[FinishReason, int]:
        """Return the limit that the next turn meets first and the tokens it may sample until then;
        below 1, the limit is met already. context: its tokens. sampled: tokens in all turns."""
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
    """Add a turn. repeated: tokens of its context that an earlier turn had computed."""
    return replace(
        usage,
        turns=usage.turns + 1,
        repeated_tokens=usage.repeated_tokens + repeated,
        cached_tokens=usage.cached_tokens + min(result.cached_tokens, repeated),
        sampling_s=usage.sampling_s + result.sampling_s,
    )


def with_lost_turn(usage: Usage, seconds: float) -> Usage:
    """Add a cancelled turn's time, or a client that cancels every turn would never time out."""
    return replace(usage, sampling_s=usage.sampling_s + seconds)
