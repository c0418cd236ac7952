"""Runs an environment in a separate process and talks to it.

A fork server imports the environment once and forks a process for each episode. If forking is
unsafe after the import, or the sandbox cannot isolate forked processes, each episode starts a new
interpreter instead.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from keel.agents.env_process.launch import (
    MAX_MESSAGE_BYTES,
    ChildProcess,
    EnvironmentProgram,
    EnvSandbox,
    encode_line,
    open_channel,
    with_deadline,
)
from keel.agents.types import ArgumentValidator, EnvironmentLost, Opening, ToolResult
from keel.rl.supervisor import KILL_S
from keel.rl.turns import Message, ToolCall, ToolSpec
from keel.rl.types import Prompt, Verdict

_TIMEOUT_KNOBS = {
    "open": "environment.open_s",
    "call": "agents.call_s",
    "reply": "environment.reply_s",
    "verdict": "environment.verdict_s",
}


class ProcessEnvironment:
    """Runs one episode of an environment program in its own process. The process is forked by
    `fork_server`, or started as a new interpreter if there is no fork server. `starting` limits how
    many processes start at the same time."""

    def __init__(
        self,
        program: EnvironmentProgram,
        *,
        starting: asyncio.Semaphore | None = None,
        fork_server: ForkServerClient | None = None,
    ) -> None:
        self._program = program
        self._starting = starting
        self._fork_server = fork_server
        self._process: ChildProcess | None = None
        self._arguments: ArgumentValidator | None = None
        self._lost: EnvironmentLost | None = None
        self._raised = False
        """True if the latest request failed because the environment's own code raised an exception
        outside a tool call."""
        self._closed = False
        self.grades = True
        """False if the environment has no verdict. Set when the environment is opened."""
        self._requests = 0
        self._turn = asyncio.Lock()

    async def open(self, task: Prompt, *, seed: int) -> Opening:
        program = self._program
        fields = {**task_fields(task), "thinking": task.thinking, "reward": dict(task.reward)}
        request = {"do": "open", **program.as_json(), "seed": seed, "task": fields}
        async with self._starting or nullcontext():
            await self._start()
            reply = await self._ask("open", request, program.open_s)
        try:
            opening = _parsed(_OpeningReply, reply)
            specs = tuple(ToolSpec(**dict(tool)) for tool in opening.tools)
            self._arguments = ArgumentValidator(specs)
        except ValueError as error:
            raise await self._fail("open", str(error)) from error
        self.grades = opening.grades
        messages = task.messages if opening.messages is None else reply["messages"]
        return Opening(messages=tuple(messages), tools=specs)

    async def _start(self) -> None:
        if self._process is not None or self._closed:
            raise EnvironmentLost("open", "an environment serves one episode")
        if self._fork_server is not None:
            self._process = await self._fork_server.fork()
        if self._process is None:
            self._process = await self._program.launch("server:serve_channel").connect()

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        if self._arguments is None:
            raise self._lost or EnvironmentLost("call", "it was not opened")
        if complaint := self._arguments.explain_error(call):
            return ToolResult(text=complaint, failed=True)
        request = {
            "do": "call",
            "name": call.name,
            "arguments": dict(call.arguments),
            "call_s": timeout_s,
        }
        try:
            reply = await self._ask("call", request, timeout_s, name=f"call of {call.name}")
        except ValueError as error:  # such as NaN
            return ToolResult(text=f"{call.name}: the call is {error}", failed=True)
        text = reply.get("text")
        if not isinstance(text, str):
            raise await self._fail("call", f"{call.name} returned no text")
        return ToolResult(
            text=text, failed=reply.get("failed") is True, done=reply.get("done") is True
        )

    async def reply(self, turn: Message) -> Message | None:
        request = {"do": "reply", "turn": dict(turn)}
        reply = await self._ask("reply", request, self._program.reply_s)
        message = reply.get("message")
        try:
            if message is not None:
                _parsed(_ChatMessage, message)
        except ValueError as error:
            raise await self._fail("reply", str(error)) from error
        return message

    async def verdict(self, messages: Sequence[Message], finish_reason: str) -> Verdict | str:
        request = {
            "do": "verdict",
            "messages": [dict(message) for message in messages],
            "finish_reason": finish_reason,
        }
        try:
            reply = await self._ask("verdict", request, self._program.verdict_s)
            return verdict_of(reply)
        except EnvironmentLost as error:
            if not self._raised:
                raise
            return str(error)
        except ValueError as error:
            return str(error)

    async def close(self) -> None:
        self._closed = True
        try:
            if self._process is not None and self._lost is None:
                with suppress(EnvironmentLost):
                    await self._ask("close", {"do": "close"}, self._program.close_s)
        finally:
            if self._process is not None:
                await self._process.end()

    async def _ask(
        self, during: str, request: Mapping[str, Any], timeout_s: float, *, name: str = ""
    ) -> dict[str, Any]:
        async with self._turn:
            process, self._raised = self._process, False
            if self._lost is not None:
                raise EnvironmentLost(during, f"lost before this: {self._lost}")
            if process is None or (self._closed and during != "close"):
                raise EnvironmentLost(during, "is not open")
            self._requests += 1
            number = self._requests
            line = encode_line({"id": number, **request})
            try:
                reply = await with_deadline(timeout_s, process.exchange(line))
            except TimeoutError as error:
                knob = f" ({_TIMEOUT_KNOBS[during]})" if during in _TIMEOUT_KNOBS else ""
                reason = f"{name or during} did not end within {timeout_s:g} s{knob}"
                raise await self._fail(during, reason) from error
            except asyncio.CancelledError:
                # A late reply would be taken for the next request's.
                self._lost = await process.lost(during, "was cancelled by the caller")
                raise
            except (EOFError, OSError) as error:
                raise await self._fail(during) from error
            except ValueError as error:
                reason = f"a message of more than {MAX_MESSAGE_BYTES >> 20} MiB"
                raise await self._fail(during, reason) from error
        if isinstance(reply, dict) and reply.get("id") == number:
            if isinstance(why := reply.get("failed"), str):
                error = await self._fail(during, why)
                # Not if it also reached its memory limit, which is then the reason.
                self._raised = reply.get("raised") is True and error.detail == why
                raise error
            if isinstance(reply.get("is"), dict):
                return reply["is"]
        raise await self._fail(during, f"sent an invalid reply: {str(reply)[:200]!r}")

    async def _fail(self, during: str, message: str = "") -> EnvironmentLost:
        """End the process. Without a `message`, its exit is the reason."""
        assert self._process is not None
        if during == "open" and message:
            message = f"{self._program.target}: {message}"
        self._lost = await self._process.lost(during, message)
        return self._lost


def task_fields(task: Prompt) -> dict[str, Any]:
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
    verdict = _parsed(_VerdictReply, reply)
    return Verdict(parts=verdict.parts, facts=verdict.facts)


_REPLY_BYTES = 1 << 16


class ForkServerClient:
    """Forks a process for each episode of a program. Use it from a single event loop. The server
    process starts at the first fork and is restarted if it dies. `open_s` is the time
    limit for the import and for each fork."""

    def __init__(self, program: EnvironmentProgram) -> None:
        self._program = program
        self.disabled_reason = "" if program.preload else "environment.preload is false"
        if program.sandbox and program.sandbox.fork_isolation is None:
            self.disabled_reason = "this machine cannot sandbox a forked process"
        self._process: ChildProcess | None = None
        self._gate, self._asking = asyncio.Lock(), asyncio.Lock()
        self._cleanups: set[asyncio.Task[Any]] = set()

    async def fork(self) -> ChildProcess | None:
        """Fork a process for an episode. Returns None if the caller has to start a process instead.
        Raises EnvironmentLost if the import or the fork fails."""
        task = asyncio.create_task(self._fork_episode())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:

            async def end_result() -> None:
                (result,) = await asyncio.gather(task, return_exceptions=True)
                if isinstance(result, ChildProcess):
                    await result.end()

            cleanup = asyncio.create_task(end_result())
            self._cleanups.add(cleanup)
            cleanup.add_done_callback(self._cleanups.discard)
            raise

    async def _fork_episode(self) -> ChildProcess | None:
        async with self._gate:
            if self._process is None and not self.disabled_reason:
                await self._start()
            if self._process is None:
                return None
            try:
                process = await self._fork(self._process)
            except (_CannotFork, OSError) as error:  # a limit of the machine; others may succeed
                raise EnvironmentLost("open", f"cannot be forked: {error}") from error
        return await process.connect()

    async def _start(self) -> None:
        program = self._program
        self._process = process = program.launch("fork_server:main", forks=True)
        try:
            if program.sandbox is not None:
                await self._check_isolation(process, program.sandbox)
                # Not before: the check starts as many processes as it can.
                process.limit = program.sandbox.limit_memory(process.pid, inside=False)
            # All arguments may not fit in one message.
            action = {"action": program.arguments.get("action")}
            load = {"do": "load", **program.as_json(), "arguments": action}
            reply, _ = await self._ask(process, load)
            if "failed" in reply:
                raise await self._lost(process, str(reply["failed"]))
            if process.limit is not None:
                process.limit()  # each forked process has its own memory limit
        except BaseException as error:
            self._process = None
            await process.end()
            if not isinstance(error, _CannotFork):
                raise
            self.disabled_reason = str(error)

    async def _check_isolation(self, process: ChildProcess, sandbox: EnvSandbox) -> None:
        try:
            attempt = await self._fork(process, run=sandbox.probe)
            ending = await attempt.end(within_s=self._program.open_s)
        except (EnvironmentLost, OSError) as error:
            reason = f"a sandbox for a forked process does not work here: {error}"
            raise _CannotFork(reason) from error
        if attempt.output != "isolated":
            reason = attempt.output or ending
            raise _CannotFork(f"a sandbox for a forked process does not work here: {reason}")

    async def close(self) -> None:
        self.disabled_reason = self.disabled_reason or "closed"
        async with self._gate:
            process, self._process = self._process, None
            if process is not None:
                await process.end()
        await asyncio.gather(*self._cleanups, return_exceptions=True)

    async def _fork(self, server: ChildProcess, *, run: str | None = None) -> ChildProcess:
        """Fork a process that runs an episode, or the Python code in `run` if given."""
        sandbox, limit = self._program.sandbox, None
        with open_channel(socket.SOCK_STREAM, private=sandbox is None) as (
            ours,
            theirs,
            stderr,
            write_end,
            scratch,
        ):
            request = {
                "do": "fork",
                "isolation": sandbox and sandbox.fork_isolation,
                "env": {"TMPDIR": scratch, **self._program.env} if scratch else {},
                "run": run,
            }
            reply, fds = await self._ask(server, request, theirs.fileno(), write_end)
            status = partial(self._reap, server, reply["is"]["pid"])
            try:
                if not fds:  # the kernel drops descriptors that do not fit
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                text = Path(f"/proc/self/fdinfo/{fds[0]}").read_text()
                match = re.search(r"^Pid:\s+(\d+)$", text, re.MULTILINE)
                pid = int(match[1]) if match else -1  # in this process's namespace
                if sandbox is not None and run is None:
                    limit = sandbox.limit_memory(pid, inside=True)
            except OSError:
                for fd in fds:
                    os.close(fd)
                ours.close()  # which ends the process
                await status()
                raise
        return ChildProcess(
            pid,
            ours,
            stderr,
            pidfd=fds[0],
            status=status,
            scratch=scratch,
            limit=limit,
        )

    async def _reap(self, server: ChildProcess, pid: int) -> int | None:
        try:
            reply, _ = await self._ask(server, {"do": "reap", "pid": pid}, timeout_s=KILL_S)
            return reply["is"]["status"]
        except (_CannotFork, EnvironmentLost, LookupError):
            return None  # the server has ended

    async def _ask(
        self,
        server: ChildProcess,
        request: Mapping[str, Any],
        *fds: int,
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], list[int]]:
        limit_s = timeout_s or self._program.open_s
        async with self._asking:
            try:
                socket.send_fds(server.channel, [json.dumps(request).encode()], fds)
                reply, received = await with_deadline(limit_s, self._receive(server.channel))
            except TimeoutError as error:
                reason = f"open did not end within {limit_s:g} s (environment.open_s)"
                raise await self._lost(server, reason) from error
            except (OSError, EOFError, ValueError) as error:
                raise await self._lost(server) from error
        if "cannot" in reply:
            raise _CannotFork(str(reply["cannot"]))
        return reply, received

    async def _receive(self, channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
        ready, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(channel, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(channel)
        line, fds, _, _ = socket.recv_fds(channel, _REPLY_BYTES, 1)
        if not line:
            raise EOFError
        return json.loads(line), fds

    async def _lost(self, server: ChildProcess, message: str = "") -> EnvironmentLost:
        if self._process is server:
            self._process = None
        lost = await server.lost("open", message)
        return EnvironmentLost("open", f"{self._program.target}: {lost.detail}", lost.output)


class _CannotFork(Exception):
    """Raised when forking isn't possible. The message says why."""
