"""The interface between a conversation and the engine that samples its turns.

Both sides represent a conversation as token ids. A turn extends the ids that the engine already
holds, so sampled tokens are never rendered and tokenised again. `Chat` implements a model's chat
format, while `TurnRequest` and `TurnResult` describe the sampling of one turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:  # reward workers start without numpy
    import numpy as np
    from numpy.typing import NDArray

    from keel.rl.types import SamplingMasks

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and `reasoning_content`, `tool_calls`, `tool_call_id`."""
MALFORMED = "malformed_call"
"""The tool name used to answer a tool call that could not be parsed."""


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The texts that open and close a thinking block in a model's format."""

    open: str
    close: str

    def ends_open(self, text: str) -> bool:
        """Return whether `text` ends inside a thinking block that is still open."""
        return text.rfind(self.open) > text.rfind(self.close)


THINK = ThinkingMarks("<think>", "</think>")
"""The marks that most model families use. Trajectories always use them: rollouts translate a
model's own marks (`keel.rollout.chat.thinking`), so that rewards and saved files only need to know
this pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """The description of a tool that the policy gets."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema for an object with the arguments."""

    def as_json(self) -> dict[str, Any]:
        """Return the tool as chat templates and OpenAI-compatible endpoints expect it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A parsed tool call by the policy, not yet checked against the tool's schema."""

    call_id: str
    """An id that is unique in the conversation. The result of the call refers to it."""
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """A tool call that could not be parsed. It is never executed, and the policy gets an error as
    the answer."""

    call_id: str
    text: str
    """The text that the policy sampled, truncated to a few hundred characters."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The content of a sampled turn after parsing."""

    content: str
    reasoning: str
    """The text in the thinking block. Tool calls in it are ignored, except with
    `tools_in_thinking`, where only those calls count."""
    closed: bool
    """True if the turn ended with a stop token. Calls of a truncated turn are never executed."""
    calls: tuple[ToolCall | Malformed, ...] = ()
    """The tool calls, in the order in which they appear in the text."""
    inside: bool = False
    """True if the turn ended inside its thinking block, which the next turn continues
    (`tools_in_thinking`)."""


class Chat(Protocol):
    """A model's chat format, which converts between messages and token ids."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    def opening(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, thinking: bool
    ) -> list[int]:
        """Return the token ids of a conversation, up to where the policy's next turn starts."""
        ...

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], *, thinking: bool
    ) -> list[int] | None:
        """Append `messages` to `ids` and start the policy's next turn.

        The result begins with `ids`, unchanged. If the last turn was truncated, its end mark is
        added. Tool messages must be in the order of the calls, with `tool_call_id` and `name`.

        Returns None if the format cannot extend the ids, for example because a new user message
        removes earlier thinking. The caller then starts a new segment.
        """
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
        """Parse the token ids of one sampled turn. `tools` are the tools passed to `opening`, which
        some formats need because they write arguments without types. `turn` is the index of the
        turn in the conversation, from which call ids are made. `inside` is `Parsed.inside` of the
        previous turn, if this turn extends it."""
        ...


def conversation_of(prompt_id: str, purpose: str, version: int, draw: int, sibling: int) -> str:
    """Return a name for the conversation of an episode, unique in the run."""
    return f"{prompt_id}/{purpose}/{version}/{draw}/{sibling}"


def prompt_of(conversation: str) -> str:
    """Return the prompt id contained in a conversation's name. Prompt ids may contain slashes."""
    return conversation.rsplit("/", 4)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request to sample one turn of a conversation, on any engine."""

    conversation: str
    """The name from `conversation_of`. The engine that has this conversation's prefix in its cache
    is preferred."""
    token_ids_T: NDArray[np.int32]
    """[T] the whole context."""
    max_tokens: int
    """Maximum number of tokens to sample."""
    seed: int
    """The sampling seed for this turn. It is derived from the run's seed, the weight version, the
    prompt, the draw, the sibling, the segment and the turn."""
    timeout_s: float = inf
    """How many seconds the engine may work on the turn before it is cut off, at most
    `rollout.timeout_s`."""
    routes_from: int = 0
    """The first position for which to return routes. Earlier turns have already returned those
    before it."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the turn, in addition to the model's EOS. They remain part of the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """The N tokens sampled after a context of T tokens, with the data that the trainer needs to
    replay them."""

    token_ids_N: NDArray[np.int32]
    logp_old_N: NDArray[np.float32]
    """log π_old as reported by the engine, after temperature and truncation."""
    version_N: NDArray[np.int32]
    """Version of the weights that sampled each token."""
    finish_reason: Literal["stop", "length", "deadline"]
    routes_RLK: NDArray[np.int16] | NDArray[np.uint8] | None = None
    """[R, L, K] the experts at positions `routes_from` … T + N − 2, input-aligned. The last sampled
    token has no row, because it was never an input. This is None if the model has no router."""
    sampling_mask: SamplingMasks | None = None
    """The sampling masks of the N tokens, or None if sampling was not truncated."""
    cached_tokens: int = 0
    """The number of context tokens that were read from the prefix cache."""
    sampling_s: float = 0.0
    """How many seconds the engine worked on the turn, not counting weight updates and sleep."""
