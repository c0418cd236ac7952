"""What a trajectory that a program drives may take, and what is left of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from keel.rl.turns import Message
from keel.rl.types import FinishReason, Segment, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Of one trajectory."""

    window: int
    """Tokens of a context with what is sampled after it."""
    tokens: int
    """Sampled tokens, over all turns."""
    turns: int
    turn_tokens: int | None = None
    """Sampled tokens of one turn. None: as many as are left. What a turn may take is set aside
    while it is sampled, so a program that asks for several turns at once wants a limit here."""
    turn_s: float = 600.0
    """Seconds that a turn may take, waiting for an engine included. Then the client gets 503."""
    deadline_s: float = inf
    """Seconds of the engine's time until a turn is cut where it is."""

    def __post_init__(self) -> None:
        for name in ("window", "tokens", "turns", "turn_tokens", "turn_s", "deadline_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"endpoint: {name} = {value} must be positive")
        if self.turn_s == inf:
            raise ValueError("endpoint: turn_s must be finite: every wait has a deadline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What became of the requests."""

    requests: int = 0
    """Those that were well-formed."""
    extended: int = 0
    """Turns that went on from the ids recorded last."""
    branched: int = 0
    """… from recorded ids that another turn had gone on from already, in a new segment."""
    rendered: int = 0
    """… from a render of the messages, in a new segment; the first one is among them."""
    repeated: int = 0
    """Answers given again to a client that never got them."""
    refused: int = 0
    failed: int = 0
    """Turns that the engine did not give, or not in time."""
    given_up: int = 0
    """Turns whose client went away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A trajectory, as the runner gets it."""

    segments: tuple[Segment, ...]
    opening: tuple[Message, ...]
    """The messages of the first turn's request."""
    messages: tuple[Message, ...]
    """All that was said after them, in the order of the turns; of all forks."""
    usage: Usage
    finish_reason: FinishReason
    """Of the last request: `stop`, or what cut or refused it."""
    counts: Counts
    failure: str = ""
    """Why the last turn that failed did. Empty: none did."""
