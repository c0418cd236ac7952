"""The environment interface. Environments can be slow, crash or hang, so every call has a
deadline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from keel.rl.turns import Message, ToolCall, ToolSpec
from keel.rl.types import LOST, Prompt, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    text: str
    failed: bool = False
    """True if the call was refused or raised an exception. `text` contains the reason."""
    done: bool = False


Fault = Literal["start", "raised", "exit", "crash", "hang", "garbage", "large", "memory", "closed"]
"""Why an environment was lost. The values mean, in this order, that it could not be started or
imported, raised an exception outside a tool call, exited, was killed by a signal, missed a
deadline, sent an invalid reply, sent a reply that was too large, ran out of memory, or was used
after its end."""


class EnvironmentLost(RuntimeError):
    """Raised when the episode can't continue. By then, all of the environment's processes are
    dead."""

    def __init__(self, fault: Fault, during: str, message: str, output: str = "") -> None:
        tail = f"; its output ends with: {output}" if output else ""
        super().__init__(f"{LOST}{during}: {message}{tail}")
        self.fault: Fault = fault
        self.during = during
        self.detail = message
        self.output = output

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.fault, self.during, self.detail, self.output)


class NodeLost(EnvironmentLost):
    """Raised when the node or actor that ran the environment is lost. The episode can be retried on
    another node."""


class Environment(Protocol):
    """An episode's environment. Its methods raise `EnvironmentLost` if the episode can't continue,
    except that `close` never raises."""

    async def open(self, task: Prompt, *, seed: int) -> Opening: ...

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        """Run a tool call. A call that violates its schema isn't run and counts as failed."""
        ...

    async def reply(self, turn: Message) -> Message | None:
        """Return the user's next message after a turn without tool calls, or None to end the
        episode."""
        ...

    async def verdict(self, messages: Sequence[Message], finish_reason: str) -> Verdict | str:
        """Grade the trajectory. Returns the reason if that isn't possible. The trajectory is then
        dropped rather than scored 0."""
        ...

    async def close(self) -> None:
        """Release all resources. Can be called more than once, and after any failure."""
        ...


class NoEnvironment:
    """An empty environment for agent programs that bring their own. It opens each task with the
    prompt's messages and offers no tools."""

    async def open(self, task: Prompt, *, seed: int) -> Opening:
        return Opening(messages=task.messages)

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        return ToolResult(text=f"there is no tool {call.name}", failed=True)

    async def reply(self, turn: Message) -> Message | None:
        return None

    async def verdict(self, messages: Sequence[Message], finish_reason: str) -> Verdict | str:
        return Verdict(parts={})

    async def close(self) -> None:
        pass


SystemPrompt = Callable[[Sequence[str]], str]
"""Returns the system prompt for the given tool names, or "" for no system prompt."""
