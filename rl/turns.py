"""What crosses the line between a conversation and the engine that continues it, turn by turn.

A conversation is tokens in, tokens out. A turn extends the ids that the engine holds already:
nothing that was sampled is ever rendered, parsed and tokenised again. `Chat` knows a model's
format; `TurnRequest` and `TurnResult` are one turn of sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from keel.rl.types import SamplingMasks

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and `reasoning_content`, `tool_calls`, `tool_call_id`."""
MALFORMED = "malformed_call"
"""The tool that answers what set out to be a call and was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as the policy is told of it."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of an object: the arguments by name."""

    def as_json(self) -> dict[str, Any]:
        """As chat templates and OpenAI-compatible endpoints have it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the policy wrote, read and not yet checked against the tool's schema."""

    call_id: str
    """Unique in its conversation; the result answers it."""
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """Something that set out to be a call and is none. Answered as a tool error, never run."""

    call_id: str
    text: str
    """What was written, cut to a few hundred characters."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a turn's sampled tokens say."""

    content: str
    reasoning: str
    """The text inside the thinking; calls in there are not calls, or with `tools_in_thinking` the
    only ones."""
    closed: bool
    """Whether the turn ended itself. Calls of a turn that was cut off are never run."""
    calls: tuple[ToolCall | Malformed, ...] = ()
    """In the order written."""
    inside: bool = False
    """The turn ended inside its thinking, and the next one continues it (`tools_in_thinking`)."""


class Chat(Protocol):
    """A model's chat format, in ids."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    def opening(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, thinking: bool
    ) -> list[int]:
        """The ids of a whole conversation so far, up to where the policy speaks."""
        ...

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], *, thinking: bool
    ) -> list[int] | None:
        """`ids` (an opening, what was sampled, earlier extensions) with `messages` after it and the
        policy to speak next. Begins with `ids`, unchanged. None: this format cannot go on from
        there (thinking that has to go at a new user message), and a new segment must begin.

        Tool messages come in the order of the calls, each with `tool_call_id` and the tool's
        `name`, which some formats repeat. The last turn may have been cut: its end is added."""
        ...

    def parse(
        self,
        sampled: Sequence[int],
        tools: Sequence[ToolSpec],
        *,
        thinking: bool,
        turn: int,
        inside: bool = False,
    ) -> Parsed:
        """Read one turn's sampled ids. `tools`: of the opening; some formats write arguments
        without their types. `turn`: its index in the conversation, for the calls' ids. `inside`:
        as the turn before was `Parsed`, if this one extends it."""
        ...


def conversation_of(prompt_id: str, purpose: str, version: int, draw: int, sibling: int) -> str:
    """The name of an episode's conversation, unique in the run."""
    return f"{prompt_id}/{purpose}/{version}/{draw}/{sibling}"


def prompt_of(conversation: str) -> str:
    """The id of the prompt that it is about, which may have slashes of its own."""
    return conversation.rsplit("/", 4)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One turn of one conversation, for any engine."""

    conversation: str
    """As `conversation_of` names it: the engine that holds its prefix is preferred."""
    token_ids_T: NDArray[np.int32]
    """[T] the whole context."""
    max_tokens: int
    """Tokens to sample at most."""
    seed: int
    """Of this turn's random draws: of run, prompt, sibling, segment and turn."""
    timeout_s: float = inf
    """Seconds of the engine's time until the turn is cut where it is; `rollout.timeout_s` at
    most."""
    routes_from: int = 0
    """The first position whose routes are wanted: those before have come with an earlier turn."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the turn and stay part of it, besides the model's own end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """N sampled tokens after a context of T, with all that the trainer replays."""

    token_ids_N: NDArray[np.int32]
    logp_old_N: NDArray[np.float32]
    """log π_old as the engine returned it, under temperature and truncation."""
    version_N: NDArray[np.int32]
    """Version of the weights that sampled each token."""
    finish_reason: Literal["stop", "length", "deadline"]
    routes_RLK: NDArray[np.int16] | NDArray[np.uint8] | None = None
    """[R, L, K] experts of positions `routes_from` … T + N − 2, input-aligned: the last sampled
    token has been nowhere yet. None: the model has no router."""
    sampling_mask: SamplingMasks | None = None
    """N spans. None: sampling was not truncated."""
    cached_tokens: int = 0
    """Of the T context tokens, those that came from the prefix cache."""
    sampling_s: float = 0.0
    """Seconds of the engine's time that it took; those in which the engine took weights or slept do
    not count."""
