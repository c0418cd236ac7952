"""What a trajectory may take and has taken: the same whether Keel drives it or a program does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from keel.rl.turns import TurnResult
from keel.rl.types import FinishReason, Usage

CHARACTERS_A_TOKEN = 16
"""More than the tokens of any long text have on average: of prose and code they have about 4."""
SHORT = 1 << 16
"""Characters that are tokenised in any case: in a tenth of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Of one trajectory."""

    turns: int
    turn_tokens: int
    """Sampled in one turn. A turn that is cut there ends an episode that Keel drives; a program is
    told so."""
    tokens: int
    """Sampled in all turns."""
    window: int
    """Tokens of a context with what is sampled after it."""
    timeout_s: float = inf
    """Seconds of the engine's time and of tools; of a program, of its own time between turns. Of a
    turn that a program gave up, all of its time counts."""
    call_s: float = 60.0
    """Of one call of an environment's tool."""
    calls: float = inf
    """Calls of its environment's tools that are run; later ones are answered with an error."""

    def __post_init__(self) -> None:
        for name in ("turns", "turn_tokens", "tokens", "window", "timeout_s", "call_s", "calls"):
            if not getattr(self, name) > 0:
                raise ValueError(f"budget: {name} = {getattr(self, name)} must be positive")

    @property
    def characters(self) -> int:
        """A text of more does not fit the window. To tokenise it, to see that, would hold up all
        other trajectories: seconds for each MiB."""
        return max(CHARACTERS_A_TOKEN * self.window, SHORT)

    def cut(self, text: str) -> str:
        """No longer than that, but for a word on what is left out."""
        more = len(text) - self.characters
        return text if more <= 0 else f"{text[:-more]}\n[{more} characters left out]"

    def refusal(self, calls: int) -> str:
        """To a call after `calls` that were run; empty where it may be run, too."""
        if calls < self.calls:
            return ""
        return f"Nothing was run: {self.calls} calls have been, and no more will be."

    def left_s(self, usage: Usage) -> float:
        return self.timeout_s - usage.sampling_s - usage.tools_s

    def room(self, usage: Usage, *, context: int, sampled: int) -> tuple[FinishReason, int]:
        """The limit that the next turn meets first, and how many tokens it may sample until there;
        below 1 it is met already. `context`: tokens of it; `sampled`: in all turns so far."""
        if usage.turns >= self.turns:
            return "turns", 0
        if self.left_s(usage) <= 0:
            return "deadline", 0
        limits: dict[FinishReason, int] = {
            "length": min(self.tokens - sampled, self.turn_tokens),
            "window": self.window - context,
        }
        nearest = min(limits, key=lambda name: limits[name])
        return nearest, limits[nearest]


def with_turn(usage: Usage, result: TurnResult, *, repeated: int) -> Usage:
    """After one more turn. `repeated`: tokens of its context that an earlier turn had computed."""
    return replace(
        usage,
        turns=usage.turns + 1,
        repeated_tokens=usage.repeated_tokens + repeated,
        cached_tokens=usage.cached_tokens + min(result.cached_tokens, repeated),
        sampling_s=usage.sampling_s + result.sampling_s,
    )


def with_lost_turn(usage: Usage, seconds: float) -> Usage:
    """After a turn that was given up. Its time counts, or a client that gives up each of its turns
    and asks again would never reach its deadline."""
    return replace(usage, sampling_s=usage.sampling_s + seconds)
