"""Controls a process that imports an environment once and forks a process for each episode. If
forking is unsafe after the import, or the sandbox cannot isolate forked processes, each episode
starts a new interpreter instead."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from keel.agents.env_process.process import (
    REAP_S,
    ChildProcess,
    EnvSandbox,
    launch,
    open_channel,
    with_deadline,
)
from keel.agents.env_process.program import ENVIRONMENT, START, Program
from keel.agents.types import EnvironmentLost, Fault

_REPLY_BYTES = 1 << 16


def reply_fault(reply: Mapping[str, Any], memory_mib: int | None) -> tuple[Fault, str] | None:
    """Return the fault and the error message in a reply from an environment's process, or None if
    it contains no error."""
    if "memory" in reply:
        return "memory", f"out of memory (memory_mib = {memory_mib})"
    if "refused" in reply:
        return "start", str(reply["refused"])
    if "raised" in reply:
        location = f" ({reply['at']})" if reply.get("at") else ""
        return "raised", f"{reply['raised']}{location}"
    return None


def fork_server_for(program: Program) -> ForkServer | None:
    """Create a fork server, or return None if `preload` is off. The caller must close the
    server."""
    return ForkServer(program) if program.preload else None


class ForkServer:
    """Forks all episodes of a program, on one event loop. Its process starts with the first fork,
    and restarts if it is lost. `deadlines.open_s` limits the time for the import and for each fork.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._sandbox = program.wrap
        self._inner = program.wrap.inner if program.wrap else None
        self.disabled_reason = ""
        """The reason episodes are not forked, or "" if they are."""
        if program.wrap and self._inner is None:
            self.disabled_reason = "this machine cannot sandbox a forked process"
        self._process: ChildProcess | None = None
        self._request_id = 0
        self._gate, self._asking = asyncio.Lock(), asyncio.Lock()
        self._cleanups: set[asyncio.Task[Any]] = set()

    async def fork(self, env: Mapping[str, str]) -> ChildProcess | None:
        """Fork a process with `env` added to its environment variables. Returns None if the caller
        must start a process itself. Raises EnvironmentLost if the import or the fork fails."""
        task = asyncio.create_task(self._fork_episode(env))
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

    async def _fork_episode(self, env: Mapping[str, str]) -> ChildProcess | None:
        async with self._gate:
            if self._process is None and not self.disabled_reason:
                await self._start()
            if self._process is None:
                return None
            try:
                process = await self._fork(self._process, env)
            except _CannotFork as error:  # the machine lacked a resource; the next fork may succeed
                raise _fork_failed(error) from error
            except (OSError, EOFError, ValueError) as error:
                raise await self._lost(error) from error
        return await process.connect()

    async def _start(self) -> None:
        program = self._program
        self._process = process = launch(
            [program.python, str(START), "fork-server"],
            socket.SOCK_SEQPACKET,
            env={**ENVIRONMENT, **program.env},
            folder=program.where,
            wrap=self._sandbox and self._sandbox.parent,
            readable=program.needed,
        )
        openenv = program.kind in ("auto", "openenv")
        load = {
            "do": "load",
            "target": program.target,
            "action": program.arguments.get("action") if openenv else None,
            "paths": [str(program.where.absolute())],
            "memory_mib": program.memory_mib,
        }
        try:
            if self._sandbox is not None:
                await self._check_isolation(process, self._sandbox)
                process.limit = self._sandbox.hold(process.pid, inside=False)
            reply, _ = await self._ask(process, load)
            if (fault := reply_fault(reply, program.memory_mib)) is not None:
                raise await self._lost(None, *fault)
            if process.limit is not None:
                process.limit()  # each forked process has its own memory limit
        except (OSError, EOFError, ValueError) as error:
            raise await self._lost(error) from error
        except BaseException as error:
            self._process = None
            await process.end()
            if not isinstance(error, _CannotFork):
                raise
            self.disabled_reason = str(error)

    async def _check_isolation(self, process: ChildProcess, sandbox: EnvSandbox) -> None:
        try:
            attempt = await self._fork(process, {}, run=sandbox.probe)
            ending = await attempt.end(within_s=self._program.deadlines.open_s)
            result = attempt.output or ending
        except _CannotFork as error:
            result = str(error)
        except (EOFError, OSError):
            lost = await process.lost("exit", "open", "")
            result = f"{lost.detail}: {lost.output}"
        if result != "isolated":
            raise _CannotFork(f"a sandbox for a forked process does not work here: {result}")

    async def _lost(
        self, error: Exception | None, fault: Fault = "exit", message: str = ""
    ) -> EnvironmentLost:
        process, self._process = self._process, None
        assert process is not None
        if isinstance(error, TimeoutError):
            fault = "hang"
            limit_s = self._program.deadlines.open_s
            message = f"open did not end within {limit_s:g} s (environment.open_s)"
        lost = await process.lost(fault, "open", message)
        message = f"{self._program.target}: {lost.detail}"
        return EnvironmentLost(lost.fault, "open", message, lost.output)

    async def close(self) -> None:
        """Stop the server and all processes that it has forked."""
        self.disabled_reason = self.disabled_reason or "closed"
        async with self._gate:
            process, self._process = self._process, None
            if process is not None:
                await process.end()
        await asyncio.gather(*self._cleanups, return_exceptions=True)

    async def _fork(
        self, server: ChildProcess, env: Mapping[str, str], *, run: str | None = None
    ) -> ChildProcess:
        """Fork a process. If `run` is set, the process executes that code instead of an episode."""
        request = {"do": "fork", "inner": self._inner, "env": dict(env), "run": run}
        try:
            with open_channel(socket.SOCK_STREAM) as (ours, theirs, stderr, write_end):
                reply, fds = await self._ask(server, request, theirs.fileno(), write_end)
                reap = partial(self._reap, server, reply["is"]["pid"])
                limit = None
                try:
                    if not fds:  # the kernel drops descriptors that do not fit
                        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                    text = Path(f"/proc/self/fdinfo/{fds[0]}").read_text()
                    match = re.search(r"^Pid:\s+(\d+)$", text, re.MULTILINE)
                    pid = int(match[1]) if match else -1  # in this process's namespace
                    if self._sandbox is not None and run is None:
                        limit = self._sandbox.hold(pid, inside=True)
                except OSError:
                    for fd in fds:
                        os.close(fd)
                    ours.close()  # which ends the process
                    await reap()
                    raise
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise _fork_failed(error) from error
        sandbox = "" if limit is None else "inside"
        return ChildProcess(
            pid, ours, stderr, pidfd=fds[0], status=reap, sandbox=sandbox, limit=limit
        )

    async def _reap(self, server: ChildProcess, pid: int) -> int | None:
        try:
            reply, _ = await self._ask(server, {"do": "reap", "pid": pid}, timeout_s=REAP_S)
            return reply["is"]["status"]
        except (_CannotFork, TimeoutError, EOFError, OSError, LookupError):
            return None  # the server has ended

    async def _ask(
        self,
        server: ChildProcess,
        request: dict[str, Any],
        *fds: int,
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], list[int]]:
        """Send a request together with the file descriptors `fds`, and return the reply with the
        received descriptors."""
        async with self._asking:
            self._request_id += 1
            line = json.dumps({"id": self._request_id, **request}).encode()
            socket.send_fds(server.channel, [line], fds)
            limit_s = timeout_s or self._program.deadlines.open_s
            reply, received = await with_deadline(limit_s, self._receive(server.channel))
        if "cannot" in reply:
            raise _CannotFork(str(reply["cannot"]))
        return reply, received

    async def _receive(self, channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
        loop = asyncio.get_running_loop()
        while True:
            ready = asyncio.Event()
            loop.add_reader(channel, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(channel)
            line, fds, _, _ = socket.recv_fds(channel, _REPLY_BYTES, 1)
            if not line:
                raise EOFError
            reply = json.loads(line)
            if reply["id"] == self._request_id:
                return reply, fds
            for fd in fds:  # reply to a request that timed out
                os.close(fd)


class _CannotFork(Exception):
    """Raised if forking is impossible, with the reason as the message."""


def _fork_failed(error: Exception) -> EnvironmentLost:
    return EnvironmentLost("start", "open", f"cannot be forked: {error}")
