"""The interface between a conversation and the engine that samples its turns.

Both sides represent a conversation as token ids. Each turn extends the ids of the previous one, so
sampled tokens are never converted to text and tokenised again. `Chat` implements a model's chat
format, and `TurnRequest` and `TurnResult` describe the sampling of one turn.
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
"""A chat message with the keys `role` and `content`, and optionally `reasoning_content`,
`tool_calls` and `tool_call_id`."""
USER_ROLES = ("user", "developer")
"""Roles whose messages end the policy's thinking, as in DeepSeek-V3.2's encoding."""
MALFORMED = "malformed_call"
"""The tool name recorded for a tool call that could not be parsed."""


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The strings that open and close a thinking block in a model's chat format."""

    open: str
    close: str

    def ends_open(self, text: str) -> bool:
        """Return True if `text` ends inside an unclosed thinking block."""
        return text.rfind(self.open) > text.rfind(self.close)


THINK = ThinkingMarks("<think>", "</think>")
"""The thinking marks used by most model families. Trajectories always use this pair: rollouts
convert a model's own marks to it (`keel.rollout.chat.parsing`), so rewards and saved files do not
need to handle any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """The tool description shown to the policy."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the object that contains the arguments."""

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
    """A parsed tool call by the policy. It has not been checked against the tool's schema."""

    call_id: str
    """An id that is unique in the conversation. The tool's result refers to it."""
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """A tool call that could not be parsed. It is never executed, and the policy receives an error
    message."""

    call_id: str
    text: str
    """The text that the policy sampled, truncated to a few hundred characters."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The parsed content of a sampled turn."""

    content: str
    reasoning: str
    """The text in the thinking block. Tool calls in it are ignored. With `tools_in_thinking`,
    however, only these calls count."""
    closed: bool
    """True if the turn ended with a stop token. The tool calls in a truncated turn are never
    executed."""
    calls: tuple[ToolCall | Malformed, ...] = ()
    """The tool calls, in the order in which they occur in the text."""
    inside: bool = False
    """True if the turn ended inside its thinking block. The next turn then continues this block
    (`tools_in_thinking`)."""


def message_of(parsed: Parsed) -> dict[str, Any]:
    """Convert a parsed turn to a message. Malformed calls become calls of the tool `MALFORMED`."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    calls: list[dict[str, Any]] = []
    for call in parsed.calls:
        function = (
            {"name": MALFORMED, "arguments": {"text": call.text}}
            if isinstance(call, Malformed)
            else {"name": call.name, "arguments": dict(call.arguments)}
        )
        calls.append({"id": call.call_id, "type": "function", "function": function})
    return {**message, "tool_calls": calls} if calls else message


class Chat(Protocol):
    """A model's chat format, which converts between messages and token ids."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a turn."""
        ...

    def opening(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, thinking: bool
    ) -> list[int]:
        """Return the token ids of a conversation up to the start of the policy's next turn."""
        ...

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], *, thinking: bool
    ) -> list[int] | None:
        """Append `messages` to `ids` and start the policy's next turn.

        The result begins with the unchanged `ids`. If the last turn was truncated, its end mark is
        added. Tool messages must have a `tool_call_id` and a `name`, and be in the order of the
        calls.

        Returns None if the format cannot extend the ids, for example because a new user message
        removes earlier thinking. In that case, the caller starts a new segment.
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
        """Parse the token ids of one sampled turn. `tools` are the tools that were passed to
        `opening`. Some formats write arguments without types and need the tools' schemas to parse
        them. `turn` is the index of the turn in the conversation, and call ids are derived from it.
        `inside` is `Parsed.inside` of the previous turn, if this turn extends that one."""
        ...


def conversation_of(prompt_id: str, purpose: str, version: int, draw: int, sibling: int) -> str:
    """Return a conversation name for an episode. It is unique within the run."""
    return f"{prompt_id}/{purpose}/{version}/{draw}/{sibling}"


def prompt_of(conversation: str) -> str:
    """Return the prompt id that a conversation name contains. Prompt ids may contain slashes."""
    return conversation.rsplit("/", 4)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request to sample one turn of a conversation. Any engine can process it."""

    conversation: str
    """The name returned by `conversation_of`. The request preferably goes to the engine that has
    this conversation's prefix in its cache."""
    token_ids_T: NDArray[np.int32]
    """The complete context, [T] token ids."""
    max_tokens: int
    """Maximum number of tokens to sample."""
    seed: int
    """The sampling seed for this turn. It is derived from the run's seed, the weight version, the
    prompt, the draw, the sibling, the segment and the turn."""
    timeout_s: float = inf
    """Time limit for sampling the turn, in seconds, at most `rollout.timeout_s`. The turn is
    truncated when the time is up."""
    routes_from: int = 0
    """The first position for which to return routes and selections. Those of earlier positions were
    returned by previous turns."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the turn, in addition to the model's EOS. They are kept as part of the
    turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """The N tokens that were sampled after a context of T tokens, with the data that the trainer
    needs."""

    token_ids_N: NDArray[np.int32]
    logp_old_N: NDArray[np.float32]
    """log π_old as reported by the engine, after temperature and truncation."""
    version_N: NDArray[np.int32]
    """Version of the weights that each token was sampled with."""
    finish_reason: Literal["stop", "length", "deadline"]
    routes_RLK: NDArray[np.int16] | NDArray[np.uint8] | None = None
    """[R, L, K] the experts used at positions `routes_from` … T + N − 2, input-aligned. The last
    sampled token has no row because it was never an input. None if the model has no router."""
    sampling_mask: SamplingMasks | None = None
    """The sampling masks of the N tokens, or None if sampling was not truncated."""
    selected_RLb: NDArray[np.uint8] | None = None
    """[R, L, b] bitmaps of the positions that sparse attention selected at the positions of
    `routes_RLK` (`keel.rl.types.Segment.selected_TLb`), or None if nothing was recorded."""
    cached_tokens: int = 0
    """Number of context tokens that were read from the prefix cache."""
    sampling_s: float = 0.0
    """Seconds that the engine spent on the turn, excluding weight updates and sleep."""
