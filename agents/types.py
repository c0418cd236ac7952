"""What an environment is: something to open, call, answer as the user, ask for a verdict, and
close.

An environment serves one trajectory and is then closed. Everything in it may be slow, crash or
hang; who drives it gives every await a deadline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from keel.rl.turns import Message, ToolCall, ToolSpec
from keel.rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Where a conversation begins."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a call came to."""

    text: str
    failed: bool = False
    """The call was refused or raised: `text` says why, and the policy may try again."""
    done: bool = False
    """The episode is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the environment makes of the trajectory."""

    parts: Mapping[str, float]
    """Named parts of the reward, 0 … 1 each; `correct` is 1 where the task is wholly done."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further things worth keeping in the trajectory's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscored:
    """No verdict: the sample is left out. Never the same as a score of 0."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """What there is to judge: every message, and how the trajectory ended."""

    messages: Sequence[Message]
    finish_reason: str


class Environment(Protocol):
    """One episode. Single use."""

    async def open(self, task: Prompt, *, seed: int) -> Opening: ...

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        """Run a call whose arguments fit the tool's schema."""
        ...

    async def reply(self, said: Message) -> Message | None:
        """The user's next message to a turn without calls; None: the episode is over."""
        ...

    async def verdict(self, transcript: Transcript) -> Verdict | Unscored: ...

    async def close(self) -> None:
        """Safe to call more than once, and after any failure."""
        ...
