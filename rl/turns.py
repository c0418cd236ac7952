"""The interface between a conversation and the engine that samples its turns.

Conversations are token ids on both sides. A turn extends the ids that the engine already holds:
sampled tokens are never rendered and tokenised again. `Chat` implements a model's format,
`TurnRequest` and `TurnResult` describe one turn of sampling.
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
"""Name of the pseudo-tool that answers a tool call that could not be parsed."""


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """Texts that open and close a block of thinking in a model's format."""

    open: str
    close: str

    def ends_open(self, text: str) -> bool:
        """Return whether `text` ends inside an unclosed block."""
        return text.rfind(self.open) > text.rfind(self.close)


THINK = ThinkingMarks("<think>", "</think>")
"""Marks of most model families. Trajectories always use this pair: rollouts translate a model's
marks (`keel.rollout.chat.thinking`), so rewards and saved files need to know no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """Description of a tool for the policy."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of an object with the arguments."""

    def as_json(self) -> dict[str, Any]:
        """Return the tool in the format of chat templates and OpenAI-compatible endpoints."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A parsed call by the policy, not yet validated against the tool's schema."""

    call_id: str
    """Unique in the conversation; the result refers to it."""
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """A call that could not be parsed. It is answered with a tool error and never executed."""

    call_id: str
    text: str
    """The sampled text, truncated to a few hundred characters."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """Parsed content of one sampled turn."""

    content: str
    reasoning: str
    """Text of the thinking block. Calls in it are ignored, except with `tools_in_thinking`, where
    they are the only ones that count."""
    closed: bool
    """True if the turn ended with a stop token. Calls of a truncated turn are never executed."""
    calls: tuple[ToolCall | Malformed, ...] = ()
    """Calls in the order of the text."""
    inside: bool = False
    """The turn ended inside its thinking block and the next one continues it
    (`tools_in_thinking`)."""


class Chat(Protocol):
    """A model's chat format in token ids."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    def opening(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, thinking: bool
    ) -> list[int]:
        """Render a conversation up to the policy's next turn."""
        ...

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], *, thinking: bool
    ) -> list[int] | None:
        """Append `messages` to `ids` and open the policy's next turn.

        The result starts with `ids`, unchanged. Returns None if the format cannot extend them, for
        example because a new user message removes earlier thinking; the caller then starts a new
        segment. Tool messages must be in the order of the calls, with `tool_call_id` and `name`.
        The end mark of a truncated last turn is added.
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
        """Parse one turn's sampled ids.

        tools: the tools of the opening, for formats that write arguments without types.
        turn: index in the conversation, for the ids of calls.
        inside: `Parsed.inside` of the previous turn, if this one extends it.
        """
        ...


def conversation_of(prompt_id: str, purpose: str, version: int, draw: int, sibling: int) -> str:
    """Return the name of an episode's conversation, unique in the run."""
    return f"{prompt_id}/{purpose}/{version}/{draw}/{sibling}"


def prompt_of(conversation: str) -> str:
    """Return the prompt id, which may contain slashes, of a conversation's name."""
    return conversation.rsplit("/", 4)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One turn of a conversation to sample, on any engine."""

    conversation: str
    """Name by `conversation_of`; the engine that caches its prefix is preferred."""
    token_ids_T: NDArray[np.int32]
    """[T] whole context."""
    max_tokens: int
    """Maximum number of tokens to sample."""
    seed: int
    """Sampling seed of this turn, derived from run, prompt, sibling, segment and turn."""
    timeout_s: float = inf
    """Engine seconds after which the turn is cut; at most `rollout.timeout_s`."""
    routes_from: int = 0
    """First position whose routes to return; earlier turns returned the ones before."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the turn and stay part of it, in addition to the model's EOS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """N sampled tokens after a context of T, with the data that the trainer replays."""

    token_ids_N: NDArray[np.int32]
    logp_old_N: NDArray[np.float32]
    """log π_old from the engine, with temperature and truncation applied."""
    version_N: NDArray[np.int32]
    """Version of the weights that sampled each token."""
    finish_reason: Literal["stop", "length", "deadline"]
    routes_RLK: NDArray[np.int16] | NDArray[np.uint8] | None = None
    """[R, L, K] experts of positions `routes_from` … T + N − 2, input-aligned: the last sampled
    token was never an input. None: the model has no router."""
    sampling_mask: SamplingMasks | None = None
    """N spans. None: sampling was not truncated."""
    cached_tokens: int = 0
    """Number of context tokens that came from the prefix cache."""
    sampling_s: float = 0.0
    """Engine seconds of the turn, without time for weight updates or sleep."""
