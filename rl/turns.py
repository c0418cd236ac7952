"""The interface between a conversation and the engine that samples its turns. Both sides represent
a conversation as token ids. Each turn extends the ids of the previous one, so sampled tokens are
never decoded and tokenised again. `Chat` implements a chat format, and `TurnRequest` and
`TurnResult` describe the sampling of one turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast

from keel.rl import strict_json

if TYPE_CHECKING:  # reward workers start without numpy
    import numpy as np
    from numpy.typing import NDArray

    from keel.rl.recordings import StoredRecordings

Message = Mapping[str, Any]
"""A chat message with the keys `role` and `content`, and optionally `reasoning_content`,
`tool_calls` and `tool_call_id`."""
USER_ROLES = ("user", "developer")
"""Roles whose messages end the policy's thinking, as in DeepSeek-V3.2's encoding."""
MALFORMED = "malformed_call"
"""Tool name recorded for a tool call that could not be parsed."""
_MAX_MALFORMED = 300
"""Maximum length of the text of a malformed call."""


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The strings that open and close a thinking block."""

    open: str
    close: str

    def ends_open(self, text: str) -> bool:
        """Return True if `text` ends inside a thinking block."""
        return text.rfind(self.open) > text.rfind(self.close)


THINK = ThinkingMarks("<think>", "</think>")
"""The thinking tags of most model families. Trajectories always use this pair: rollouts convert a
model's own tags to it (`keel.rollout.chat.parsing`), so rewards and saved files do not need to
handle others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as described to the policy."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""

    def as_json(self) -> dict[str, Any]:
        """Convert to the format used by chat templates and OpenAI-compatible endpoints."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call parsed from the policy's output, not yet checked against the tool's schema."""

    call_id: str
    """Id, unique in the conversation, that the tool's result refers to."""
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """A tool call that could not be parsed. It is not executed, and the policy receives an error
    message instead."""

    call_id: str
    text: str
    """The sampled text, truncated to a few hundred characters."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The contents of a parsed turn."""

    content: str
    reasoning: str
    """Text of the thinking block. By default, tool calls inside it are ignored. With
    `tools_in_thinking`, only these count."""
    closed: bool
    """True if the turn ended with a stop token. Tool calls in a truncated turn are not executed."""
    calls: tuple[ToolCall | Malformed, ...] = ()
    """Tool calls in the order in which they appear in the text."""
    in_thinking: bool = False
    """True if the turn ended inside its thinking block, which the next turn then continues
    (`tools_in_thinking`)."""


def message_of(parsed: Parsed) -> dict[str, Any]:
    """Convert a parsed turn to a chat message. Malformed calls become calls to the tool
    `MALFORMED`."""
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


def openai_message(message: Message) -> dict[str, Any]:
    """Convert a chat message to OpenAI's format, where the arguments of calls are JSON text."""
    calls: list[dict[str, Any]] = []
    for call in message.get("tool_calls") or ():
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else dict(message)


def parse_call(call_id: str, name: str, arguments: str) -> ToolCall | Malformed:
    """Parse a tool call in OpenAI's format, where the arguments are JSON text."""
    try:
        value = strict_json.replace_surrogates(strict_json.load(arguments))
        if not isinstance(value, dict):
            raise ValueError("the arguments are not a JSON object")
    except ValueError as error:
        text = strict_json.replace_surrogates(f"{name}({arguments})"[:_MAX_MALFORMED])
        return Malformed(call_id=call_id, text=text, why=str(error))
    return ToolCall(call_id=call_id, name=name, arguments=cast(dict[str, Any], value))


class Chat(Protocol):
    """A chat format, which converts between messages and token ids."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a turn."""
        ...

    def opening(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, thinking: bool
    ) -> list[int]:
        """Tokenize a conversation up to the start of the policy's next turn."""
        ...

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], *, thinking: bool
    ) -> list[int] | None:
        """Append `messages` to `ids` without changing them, and start the policy's next turn. If
        the last turn was truncated, the missing end-of-turn token is added. Tool messages need a
        `tool_call_id` and a `name`, and must be in the same order as the calls.

        Returns None if the format can't extend the ids, for example because a new user message
        removes earlier thinking. The caller then has to start a new segment.
        """
        ...

    def parse(
        self,
        sampled: Sequence[int],
        tools: Sequence[ToolSpec],
        *,
        thinking: bool,
        turn: int,
        in_thinking: bool = False,
    ) -> Parsed:
        """Parse one sampled turn's token ids. `tools` are the tools that were passed to `opening`;
        formats that write untyped arguments need their schemas. `turn` is the turn's index in the
        conversation and determines the call ids. `in_thinking` is `Parsed.in_thinking` of the
        previous turn, which this turn then continues."""
        ...


def conversation_of(prompt_id: str, purpose: str, version: int, draw: int, sibling: int) -> str:
    """Return the name of an episode's conversation, which is unique within the run."""
    return f"{prompt_id}/{purpose}/{version}/{draw}/{sibling}"


def prompt_of(conversation: str) -> str:
    """Extract the prompt id from a conversation name. Prompt ids may contain slashes."""
    return conversation.rsplit("/", 4)[0]


def seed_of(*of: object) -> int:
    """Derive a seed in [0, 2⁶³) by hashing the parts. It is the same in every process and every
    run. Only the last part may contain a slash."""
    key = "/".join(map(str, of)).encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request to sample one turn of a conversation."""

    size: ClassVar[int] = 1
    """Number of completions."""
    conversation: str
    """The name from `conversation_of`. The request preferably goes to the engine that has the
    conversation in its prefix cache."""
    token_ids_T: NDArray[np.int32]
    """[T] Token ids of the whole context."""
    max_tokens: int
    """Maximum number of tokens to sample."""
    seed: int
    """Sampling seed of this turn, derived from the run's seed, the weight version, the prompt, the
    draw, the sibling, the segment and the turn."""
    timeout_s: float = inf
    """Time limit in seconds, at most `rollout.timeout_s`. Afterwards, the turn is truncated."""
    routes_from: int = 0
    """First position to return routes and selections for. Previous turns returned the
    earlier ones."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the turn, in addition to the model's EOS. They are kept as part of the
    turn."""

    @property
    def label(self) -> str:
        return f"turn of conversation {self.conversation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """The R tokens sampled in a turn, or for a completion of a group, along with the data the
    trainer needs."""

    token_ids_R: NDArray[np.int32]
    logp_old_R: NDArray[np.float32]
    """log π_old from the engine, after temperature and truncation."""
    version_R: NDArray[np.int32]
    """Version of the weights that each token was sampled with."""
    finish_reason: Literal["stop", "length", "deadline"]
    recordings: StoredRecordings | None = None
    """The large arrays recorded for the turn, or None if nothing was recorded."""
    cached_tokens: int = 0
    """Number of context tokens read from the prefix cache."""
    sampling_s: float = 0.0
    """Time that the engine spent on the turn in seconds, excluding weight updates and sleep."""
