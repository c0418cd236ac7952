"""What is left of a trajectory that a program drove."""

from __future__ import annotations

from dataclasses import dataclass

from keel.rl.turns import Message
from keel.rl.types import Dialogue, FinishReason, Segment, Usage


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
    dialogues: tuple[Dialogue, ...]
    """The same messages by conversation, with the tools they were sampled under."""
    usage: Usage
    finish_reason: FinishReason
    """Of the last request: `stop`, or what cut or refused it."""
    counts: Counts
    failure: str = ""
    """Why an engine or the endpoint itself could not answer a request. Empty: none failed so."""
    refusal: str = ""
    """Why the last request that was refused was."""
