"""Controls a process that imports an environment once and forks a process for each episode.

This saves the time for imports, which take up most of an episode's start. Forking is unsafe if the
import starts threads or opens files. In that case, or if the sandbox cannot isolate forked
processes, each episode starts a new interpreter instead.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from keel.agents.env_process.process import (
    EXIT_S,
    REAP_S,
    ForkedChild,
    ForkingWrap,
    LimitCheck,
    LineProcess,
    OutputTail,
    StartedChild,
    Wrap,
    end_child,
    launch,
    not_wrapped,
    with_deadline,
)
from keel.agents.types import EnvironmentLost, Fault

_REPLY_BYTES = 1 << 16
_Reply = dict[str, Any]


class ForkServer:
    """Forks the processes for all episodes of a program.

    It belongs to one event loop. It starts with the first fork, restarts if its process is lost,
    and ends with `close`. `load` is the request that loads the program (see
    `keel.agents.env_runtime.fork_server`). `timeout_s` limits the time to load it, and the time for
    each fork.
    """

    def __init__(
        self,
        command: Sequence[str],
        load: _Reply,
        *,
        env: Mapping[str, str],
        folder: Path,
        wrap: Wrap,
        readable: Sequence[Path],
        timeout_s: float,
    ) -> None:
        self._load, self._timeout_s = load, timeout_s
        self._inner: Mapping[str, Any] | None = None
        self._sandbox: ForkingWrap | None = None
        self.disabled_reason = ""
        """Why episodes are not forked, or "" if they are."""
        if wrap is not not_wrapped:
            self._inner = getattr(wrap, "inner", None)
            if self._inner is None:
                self.disabled_reason = "this machine cannot sandbox a forked process"
            else:
                self._sandbox = cast(ForkingWrap, wrap)
                wrap = self._sandbox.parent
        self._start_server = partial(
            _Server.start,
            command,
            env=env,
            folder=folder,
            wrap=wrap,
            readable=readable,
            timeout_s=timeout_s,
        )
        self._server: _Server | None = None
        self._load_error: EnvironmentLost | None = None
        """The error from the last attempt to load, raised in every fork that waited for it."""
        self._gate = asyncio.Lock()
        self._cleanups: set[asyncio.Task[Any]] = set()

    async def fork(self, env: Mapping[str, str]) -> LineProcess | None:
        """Fork a process with `env` added to its environment variables.

        Returns None if the caller must start a new process instead. Raises EnvironmentLost if
        loading fails.
        """
        task = asyncio.create_task(self._fork(env))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            cleanup = asyncio.create_task(_end_result(task))
            self._cleanups.add(cleanup)
            cleanup.add_done_callback(self._cleanups.discard)
            raise

    async def _fork(self, env: Mapping[str, str]) -> LineProcess | None:
        if self.disabled_reason:
            return None
        previous = self._load_error
        async with self._gate:
            if self.disabled_reason:  # set while this fork waited
                return None
            if self._server is None:
                if (error := self._load_error) is not None and error is not previous:
                    raise EnvironmentLost(error.fault, error.during, error.detail, error.output)
                await self._start()
            if self._server is None:
                return None
            watch = None if self._sandbox is None else partial(self._sandbox.hold, inside=True)
            try:
                forked = await self._server.fork(self._inner, env, watch)
            except _CannotFork as error:  # the machine lacked a resource; the next fork may succeed
                raise _fork_failed(error) from error
            except (TimeoutError, OSError, EOFError, ValueError) as error:
                raise await self._lost(error) from error
        return await LineProcess.attach(*forked)

    async def _start(self) -> None:
        self._server = server = await self._start_server()
        try:
            if self._sandbox is not None:
                await self._check_isolation(server, self._sandbox)
                server.child.limit = self._sandbox.hold(server.child.pid, inside=False)
            await server.ask(self._load)
            if server.child.limit is not None:
                server.child.limit()  # each forked process has its own memory limit
        except _CannotFork as error:
            self.disabled_reason = str(error)
            self._server = None
            await server.end()
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            self._load_error = await self._lost(error)
            raise self._load_error from error
        except BaseException:
            self._server = None
            await server.end()
            raise

    async def _check_isolation(self, server: _Server, sandbox: ForkingWrap) -> None:
        """Raise _CannotFork if a forked process could escape from its sandbox."""
        try:
            forked = await server.fork(self._inner, {}, None, run=sandbox.probe)
            process = await LineProcess.attach(*forked)
            ending = await process.end(within_s=self._timeout_s)
            result = process.output or ending
        except _CannotFork as error:
            result = str(error)
        except (EOFError, OSError) as error:
            result = f"{await server.end(EXIT_S)}: {server.output.text() or error}"
        if result != "isolated":
            raise _CannotFork(f"a sandbox for a forked process does not work here: {result}")

    async def _lost(self, error: BaseException) -> EnvironmentLost:
        """End the server and all its children after a failure."""
        server, self._server = self._server, None
        assert server is not None
        fault: Fault = "exit"
        message = ""
        if isinstance(error, TimeoutError):
            fault, message = "hang", f"open did not end within {self._timeout_s:g} s"
        elif isinstance(error, _LoadFailed):
            fault, message = error.fault, str(error)
            if fault == "memory":
                message += f" (memory_mib = {self._load['memory_mib']})"
        ending = await server.end(EXIT_S if fault == "exit" else 0.0)
        if fault == "exit":
            fault = "crash" if ending.startswith("was ended") else "exit"
            message = ending
        if server.child.limit_hit:
            fault, message = "memory", server.child.limit_hit
        target = self._load["target"]
        return EnvironmentLost(fault, "open", f"{target}: {message}", server.output.text())

    async def close(self) -> None:
        """End the server and every process that it has forked."""
        self.disabled_reason = self.disabled_reason or "closed"
        async with self._gate:
            server, self._server = self._server, None
            if server is not None:
                await server.end()
        await asyncio.gather(*self._cleanups, return_exceptions=True)


async def _end_result(task: asyncio.Task[LineProcess | None]) -> None:
    process = (await asyncio.gather(task, return_exceptions=True))[0]
    if isinstance(process, LineProcess):
        await process.end()


class _CannotFork(Exception):
    """Forking is impossible for the reason in the message."""


class _LoadFailed(ValueError):
    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault


class _Server:
    """The server's process, which handles one request at a time."""

    def __init__(
        self, child: StartedChild, control: socket.socket, output: OutputTail, timeout_s: float
    ) -> None:
        self.child, self.output = child, output
        self._control, self._timeout_s = control, timeout_s
        self._request_id = 0
        self._gate = asyncio.Lock()
        self._end: asyncio.Task[str] | None = None

    @staticmethod
    async def start(
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        folder: Path,
        wrap: Wrap,
        readable: Sequence[Path],
        timeout_s: float,
    ) -> _Server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                child, stderr = launch(
                    command, theirs, env=env, folder=folder, wrap=wrap, readable=readable
                )
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        return _Server(child, ours, OutputTail(stderr), timeout_s)

    async def ask(
        self, request: _Reply, *fds: int, timeout_s: float | None = None
    ) -> tuple[_Reply, list[int]]:
        """Send a request and return its reply.

        Raises _CannotFork, _LoadFailed, TimeoutError, EOFError or OSError.
        """
        async with self._gate:
            self._request_id += 1
            line = json.dumps({"id": self._request_id, **request}).encode()
            socket.send_fds(self._control, [line], fds)
            reply, fds_back = await with_deadline(timeout_s or self._timeout_s, self._receive())
        if "cannot" in reply:
            raise _CannotFork(str(reply["cannot"]))
        if "memory" in reply:
            raise _LoadFailed("memory", "out of memory")
        if "refused" in reply:
            raise _LoadFailed("start", str(reply["refused"]))
        if "raised" in reply:
            location = f" ({reply['at']})" if reply.get("at") else ""
            raise _LoadFailed("raised", f"{reply['raised']}{location}")
        return reply["is"], fds_back

    async def _receive(self) -> tuple[_Reply, list[int]]:
        loop = asyncio.get_running_loop()
        while True:
            ready = loop.create_future()
            loop.add_reader(self._control, lambda: ready.done() or ready.set_result(None))  # noqa: B023
            try:
                await ready
            finally:
                loop.remove_reader(self._control)
            line, fds, _, _ = socket.recv_fds(self._control, _REPLY_BYTES, 1)
            if not line:
                raise EOFError
            reply = json.loads(line)
            if reply["id"] == self._request_id:
                return reply, fds
            for fd in fds:  # reply to a cancelled request
                os.close(fd)

    async def fork(
        self,
        inner: Mapping[str, Any] | None,
        env: Mapping[str, str],
        watch: Callable[[int], LimitCheck] | None,
        *,
        run: str | None = None,
    ) -> tuple[ForkedChild, socket.socket, int]:
        """Fork a process and return the arguments for `LineProcess.attach`.

        Raises the same errors as `ask`, and EnvironmentLost if this process has run out of file
        descriptors.
        """
        ours, theirs, stderr, write_end = _open_channel()
        request = {"do": "fork", "inner": inner, "env": dict(env), "run": run}
        try:
            forked, fds = await self.ask(request, theirs.fileno(), write_end)
        except BaseException:
            ours.close()
            os.close(stderr)
            raise
        finally:
            theirs.close()
            os.close(write_end)
        reap = partial(self._reap, forked["pid"])
        try:
            if not fds:  # the kernel drops descriptors that do not fit
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            pid = _local_pid(fds[0])
            limit = watch(pid) if watch is not None else None
        except OSError as error:
            ours.close()  # which ends the process
            for fd in (stderr, *fds):
                os.close(fd)
            await reap()
            raise _fork_failed(error) from error
        return ForkedChild(fds[0], pid, reap, limit), ours, stderr

    async def _reap(self, pid: int) -> int | None:
        try:
            reply, _ = await self.ask({"do": "reap", "pid": pid}, timeout_s=REAP_S)
        except (_CannotFork, TimeoutError, EOFError, OSError, ValueError):  # the server has ended
            return None
        return reply["status"]

    async def end(self, within_s: float = 0.0) -> str:
        """Kill the server and its children. Returns how it ended if it exited within `within_s`."""
        if self._end is None:
            self._end = asyncio.create_task(self._shut_down(within_s))
        return await asyncio.shield(self._end)

    async def _shut_down(self, within_s: float) -> str:
        ending = await end_child(self.child, within_s, self.output)
        self._control.close()
        return ending


def _open_channel() -> tuple[socket.socket, socket.socket, int, int]:
    try:
        ours, theirs = socket.socketpair()
        try:
            return ours, theirs, *os.pipe()
        except OSError:
            ours.close()
            theirs.close()
            raise
    except OSError as error:
        raise _fork_failed(error) from error


def _fork_failed(error: Exception) -> EnvironmentLost:
    return EnvironmentLost("start", "open", f"cannot be forked: {error}")


def _local_pid(pidfd: int) -> int:
    """Return the PID that a process has in this process's namespace."""
    text = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    match = re.search(r"^Pid:\s+(-?\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else -1
