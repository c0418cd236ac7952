"""Communicates with an environment that runs in a separate process."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from keel.agents.env_process.fork_server import ForkServer, reply_fault
from keel.agents.env_process.process import (
    MAX_MESSAGE_BYTES,
    ChildProcess,
    encode_line,
    launch,
    with_deadline,
)
from keel.agents.env_process.program import ENVIRONMENT, START, Program
from keel.agents.schemas import Arguments, arguments_of
from keel.agents.types import EnvironmentLost, Fault, Opening, ToolResult, Transcript, Unscored
from keel.rl.turns import Message, ToolCall, ToolSpec
from keel.rl.types import Prompt, Verdict

_TIMEOUT_KNOBS = {
    "open": "environment.open_s",
    "call": "agents.call_s",
    "reply": "environment.reply_s",
    "verdict": "environment.verdict_s",
}
_MAX_S = 1e9
"""The time limit that is sent instead of infinity, which JSON cannot represent."""


class Hosted:
    """An episode of a `Program`. If `fork_server` is given, it forks the process of the episode.
    Otherwise, a new process is started. `starting` limits how many processes start at the same
    time."""

    def __init__(
        self,
        program: Program,
        *,
        starting: asyncio.Semaphore | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._program = program
        self._starting = starting
        self._fork_server = fork_server
        self._process: ChildProcess | None = None
        self._arguments: Arguments | None = None
        self._lost: EnvironmentLost | None = None
        self._closed = False
        self.grades = True
        """False if the environment has no verdict. Set when the environment is opened."""
        self._scratch = ""
        self._requests = 0
        self._turn = asyncio.Lock()

    async def open(self, task: Prompt, *, seed: int) -> Opening:
        async with self._starting or nullcontext():
            return await self._open(task, seed)

    async def _open(self, task: Prompt, seed: int) -> Opening:
        if self._process is not None or self._closed:
            raise EnvironmentLost("closed", "open", "an environment serves one episode")
        program = self._program
        extra_env: dict[str, str] = {}
        if program.wrap is None:  # a sandbox has a private one
            self._scratch = tempfile.mkdtemp(prefix="keel-")
            extra_env = {"TMPDIR": self._scratch, **program.env}
        if self._fork_server is not None:
            self._process = await self._fork_server.fork(extra_env)
        if self._process is None:
            self._process = await launch(
                [program.python, str(START)],
                env={**ENVIRONMENT, **extra_env, **program.env},
                folder=program.where,
                wrap=program.wrap,
                readable=program.needed,
            ).connect()
        request = {
            "do": "open",
            "target": program.target,
            "kind": program.kind,
            "arguments": dict(program.arguments),
            "paths": [str(program.where.absolute())],
            "seed": seed,
            "memory_mib": program.memory_mib,
            "task": {
                **task_fields(task),
                "thinking": task.thinking,
                "reward": dict(task.reward),
            },
        }
        reply = await self._ask("open", request, program.deadlines.open_s)
        try:
            opening = _parsed(_OpeningReply, reply)
            specs = tuple(ToolSpec(**dict(tool)) for tool in opening.tools)
            self._arguments = arguments_of(specs)
        except ValueError as error:
            raise await self._fail("start", "open", f"{program.target}: {error}") from error
        self.grades = opening.grades
        messages = task.messages if opening.messages is None else reply["messages"]
        return Opening(messages=tuple(messages), tools=specs)

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        if self._arguments is None:
            raise self._lost or EnvironmentLost("closed", "call", "it was not opened")
        if complaint := self._arguments.complaint(call):
            return ToolResult(text=complaint, failed=True)
        request = {
            "do": "call",
            "name": call.name,
            "arguments": dict(call.arguments),
            "call_s": min(timeout_s, _MAX_S),
        }
        try:
            reply = await self._ask("call", request, timeout_s, name=f"call of {call.name}")
        except ValueError as error:  # such as NaN
            return ToolResult(text=f"{call.name}: the call is {error}", failed=True)
        text = reply.get("text")
        if not isinstance(text, str):
            raise await self._fail("garbage", "call", f"{call.name} returned no text")
        return ToolResult(
            text=text, failed=reply.get("failed") is True, done=reply.get("done") is True
        )

    async def reply(self, turn: Message) -> Message | None:
        request = {"do": "reply", "turn": dict(turn)}
        reply = await self._ask("reply", request, self._program.deadlines.reply_s)
        message = reply.get("message")
        try:
            if message is not None:
                _parsed(_ChatMessage, message)
        except ValueError as error:
            raise await self._fail("garbage", "reply", str(error)) from error
        return message

    async def verdict(self, transcript: Transcript) -> Verdict | Unscored:
        request = {
            "do": "verdict",
            "messages": [dict(message) for message in transcript.messages],
            "finish_reason": transcript.finish_reason,
        }
        try:
            reply = await self._ask("verdict", request, self._program.deadlines.verdict_s)
            return verdict_of(reply)
        except EnvironmentLost as error:
            return Unscored(reason=str(error), fault=error.fault)
        except ValueError as error:
            return Unscored(reason=str(error))

    async def close(self) -> None:
        self._closed = True
        try:
            if self._process is not None and self._lost is None:
                with suppress(EnvironmentLost):
                    await self._ask("close", {"do": "close"}, self._program.deadlines.close_s)
        finally:
            if self._process is not None:
                await self._process.end()
            scratch, self._scratch = self._scratch, ""
            if scratch:
                shutil.rmtree(scratch, ignore_errors=True)

    async def _ask(
        self, during: str, request: Mapping[str, Any], timeout_s: float, *, name: str = ""
    ) -> dict[str, Any]:
        """Send a request and return the reply. On any failure, the process is killed and
        EnvironmentLost is raised. Raises ValueError if the request cannot be encoded as JSON."""
        async with self._turn:
            process = self._process
            if self._lost is not None:
                raise EnvironmentLost("closed", during, f"lost before this: {self._lost}")
            if process is None or (self._closed and during != "close"):
                raise EnvironmentLost("closed", during, "is not open")
            self._requests += 1
            number = self._requests
            line = encode_line({"id": number, **request})

            async def exchange() -> dict[str, Any] | str:
                await process.send(line)
                return await process.receive()

            try:
                reply = await with_deadline(timeout_s, exchange())
            except TimeoutError as error:
                knob = f" ({_TIMEOUT_KNOBS[during]})" if during in _TIMEOUT_KNOBS else ""
                reason = f"{name or during} did not end within {timeout_s:g} s{knob}"
                raise await self._fail("hang", during, reason) from error
            except asyncio.CancelledError:
                # A late reply would be taken for the next request's.
                self._lost = await process.lost("closed", during, "was cancelled by the caller")
                raise
            except (EOFError, OSError) as error:
                raise await self._fail("exit", during, "") from error
            except ValueError as error:
                reason = f"a message of more than {MAX_MESSAGE_BYTES >> 20} MiB"
                raise await self._fail("large", during, reason) from error
        if isinstance(reply, dict) and reply.get("id") == number:
            if (fault := reply_fault(reply, self._program.memory_mib)) is not None:
                raise await self._fail(fault[0], during, fault[1])
            if isinstance(reply.get("is"), dict):
                return reply["is"]
        raise await self._fail("garbage", during, f"sent an invalid reply: {str(reply)[:200]!r}")

    async def _fail(self, fault: Fault, during: str, message: str) -> EnvironmentLost:
        assert self._process is not None
        if during == "open":
            message = f"{self._program.target}: {message}" if message else message
        self._lost = await self._process.lost(fault, during, message)
        return self._lost


def task_fields(task: Prompt) -> dict[str, Any]:
    """Return the fields of a task as JSON, without the reward."""
    return {
        "prompt_id": task.prompt_id,
        "domain": task.domain,
        "messages": [dict(message) for message in task.messages],
        "tools": [dict(tool) for tool in task.tools],
    }


class _ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str


class _Tool(BaseModel):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class _OpeningReply(BaseModel):
    tools: list[_Tool]
    messages: Annotated[list[_ChatMessage], Field(min_length=1)] | None = None
    grades: bool = True


class _VerdictReply(BaseModel):
    parts: dict[str, Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]]
    facts: dict[str, Any] = {}


_Model = TypeVar("_Model", bound=BaseModel)


def _parsed(model: type[_Model], reply: Any) -> _Model:
    try:
        return model.model_validate(reply)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}, is {str(reply)[:200]!r}") from error


def verdict_of(reply: Mapping[str, Any]) -> Verdict:
    """Parse a verdict, which is an object with `parts` and `facts`. Raises ValueError if it is
    invalid."""
    verdict = _parsed(_VerdictReply, reply)
    return Verdict(parts=verdict.parts, facts=verdict.facts)
