"""What an environment is: something to open, call, answer as the user, ask for a verdict, and
close.

An environment serves one trajectory and is then closed. Everything in it may be slow, crash or
hang; who drives it gives every await a deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from keel.rl.turns import Message, ToolCall, ToolSpec
from keel.rl.types import LOST, Prompt, Verdict


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


Fault = Literal["start", "raised", "exit", "crash", "hang", "garbage", "large", "memory", "closed"]
"""Why an episode cannot go on: its environment cannot be imported or started; raised outside a tool
call; ended itself; was ended by a signal; did not answer in time; said what is no answer; said too
much; ran out of memory; was closed before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscored:
    """No verdict: the sample is left out. Never the same as a score of 0."""

    reason: str
    fault: Fault | None = None
    """Where the environment was lost over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """What there is to judge: every message, and how the trajectory ended."""

    messages: Sequence[Message]
    finish_reason: str


class EnvironmentLost(RuntimeError):
    """The episode cannot go on. Its environment has been ended, with all its processes."""

    def __init__(self, fault: Fault, during: str, message: str, words: str = "") -> None:
        """during: the method that was awaited; words: the last that the environment printed."""
        said = f"; its last words: {words}" if words else ""
        super().__init__(f"{LOST}{during}: {message}{said}")
        self.fault: Fault = fault
        self.during = during
        self.detail = message
        self.words = words


class Environment(Protocol):
    """One episode. Single use. `open`, `call` and `reply` raise `EnvironmentLost` where the episode
    cannot go on; a `verdict` that cannot be had is `Unscored`; `close` raises nothing."""

    async def open(self, task: Prompt, *, seed: int) -> Opening: ...

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        """Run a call. What does not fit a tool's schema is a failed result and is not run."""
        ...

    async def reply(self, said: Message) -> Message | None:
        """The user's next message to a turn without calls; None: the episode is over."""
        ...

    async def verdict(self, transcript: Transcript) -> Verdict | Unscored: ...

    async def close(self) -> None:
        """Safe to call more than once, and after any failure."""
        ...


class NoEnvironment:
    """A task as it stands: no tools, no user, no verdict. Of programs that bring all of that."""

    async def open(self, task: Prompt, *, seed: int) -> Opening:
        return Opening(messages=task.messages)

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        return ToolResult(text=f"there is no tool {call.name}", failed=True)

    async def reply(self, said: Message) -> Message | None:
        return None

    async def verdict(self, transcript: Transcript) -> Verdict | Unscored:
        return Verdict(parts={})

    async def close(self) -> None:
        pass
