"""Interface of an environment.

An environment serves one trajectory and is then closed. It may be slow, crash or hang, so its
caller sets a deadline for every await.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from keel.rl.turns import Message, ToolCall, ToolSpec
from keel.rl.types import LOST, Prompt, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """First messages of a conversation, and its tools."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """Result of a tool call."""

    text: str
    failed: bool = False
    """The call was refused or raised; `text` says why, and the policy may try again."""
    done: bool = False
    """The episode is over."""


Fault = Literal["start", "raised", "exit", "crash", "hang", "garbage", "large", "memory", "closed"]
"""Reason why an environment was lost: it could not be imported or started; raised outside a tool
call; exited; was killed by a signal; missed a deadline; sent an invalid reply; sent too large a
reply; ran out of memory; had been closed before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscored:
    """No verdict: the trajectory is dropped, which differs from a score of 0."""

    reason: str
    fault: Fault | None = None
    """Set if the environment was lost while it graded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """All messages of a trajectory and how it ended, for the verdict."""

    messages: Sequence[Message]
    finish_reason: str


class EnvironmentLost(RuntimeError):
    """The episode cannot continue; the environment and all its processes have been killed."""

    def __init__(self, fault: Fault, during: str, message: str, output: str = "") -> None:
        """during: the awaited method. output: tail of the environment's standard error."""
        tail = f"; its last words: {output}" if output else ""
        super().__init__(f"{LOST}{during}: {message}{tail}")
        self.fault: Fault = fault
        self.during = during
        self.detail = message
        self.output = output


class Environment(Protocol):
    """One episode. `open`, `call` and `reply` raise `EnvironmentLost` if it cannot continue, a
    missing `verdict` is `Unscored`, and `close` raises nothing."""

    async def open(self, task: Prompt, *, seed: int) -> Opening: ...

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        """Run a call. A call that violates the tool's schema fails without running."""
        ...

    async def reply(self, turn: Message) -> Message | None:
        """Return the user's answer to a turn without calls, or None to end the episode."""
        ...

    async def verdict(self, transcript: Transcript) -> Verdict | Unscored: ...

    async def close(self) -> None:
        """Release everything. Safe to call more than once, and after any failure."""
        ...


class NoEnvironment:
    """A task alone: no tools, no user, no verdict. For programs that bring their own."""

    async def open(self, task: Prompt, *, seed: int) -> Opening:
        return Opening(messages=task.messages)

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        return ToolResult(text=f"there is no tool {call.name}", failed=True)

    async def reply(self, turn: Message) -> Message | None:
        return None

    async def verdict(self, transcript: Transcript) -> Verdict | Unscored:
        return Verdict(parts={})

    async def close(self) -> None:
        pass
