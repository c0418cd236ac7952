"""Child processes that exchange JSON lines with Keel and are killed together with their
descendants.

A single event loop manages hundreds of them, each with a few file descriptors and no thread.
`asyncio.create_subprocess_exec` is not used because it takes a thread per process in Python 3.11.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from keel.agents.types import EnvironmentLost, Fault

MAX_MESSAGE_BYTES = 8 << 20
"""Size limit for a message. A process that sends a larger one is killed."""
EXIT_S = 30.0
"""Seconds to wait for the exit status of a process that has closed its channel."""
REAP_S = 60.0
"""Seconds to wait until a killed process has disappeared."""
_OUTPUT_BYTES = 4096
_READ_S = 1.0
_INHERITED_ENV = ("HOME", "LANG", "LC_ALL", "PATH", "TMPDIR", "TZ", "USER")
"""The only variables that an environment inherits. It must not see keys or tokens."""

LimitCheck = Callable[[], str]
"""Stops monitoring a sandbox's memory. Returns the limit that ended the sandbox, or ""."""


class SandboxLaunch(Protocol):
    """A command line that is ready to start."""

    @property
    def command(self) -> Sequence[str]: ...

    @property
    def pass_fds(self) -> Sequence[int]: ...

    @property
    def env(self) -> Mapping[str, str]:
        """Variables that override the inherited environment variables."""
        ...

    def started(self, pid: int) -> LimitCheck | None:
        """Monitor the process that was started.

        Returns None unless the process is the outer process of a sandbox, which exits after
        everything inside it.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Bare:
    """A `SandboxLaunch` that uses no sandbox."""

    command: Sequence[str]
    pass_fds: Sequence[int] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])

    def started(self, pid: int) -> None:
        return None


class Wrap(Protocol):
    """Puts a command line into a sandbox.

    The files that it opens may be closed once the process has started.
    """

    def __call__(
        self, command: Sequence[str], *, readable: Sequence[Path]
    ) -> AbstractContextManager[SandboxLaunch]:
        """Return the launch for `command`.

        `readable` are the files and folders that the program needs in addition to the system and
        its interpreter. Raises FileNotFoundError or PermissionError with a message for the user.
        """
        ...


class ForkingWrap(Protocol):
    """A sandbox whose process may fork children, each isolated as if it were started separately."""

    @property
    def inner(self) -> Mapping[str, Any] | None:
        """Settings for `keel.agents.env_runtime.isolate`, or None if this machine does not allow
        it."""
        ...

    @property
    def probe(self) -> str:
        """Python code that tries to escape, and prints `isolated` if it fails."""
        ...

    def parent(
        self, command: Sequence[str], *, readable: Sequence[Path]
    ) -> AbstractContextManager[SandboxLaunch]:
        """Return the launch for a process that forks. It is like `__call__`, but sets no memory
        limit."""
        ...

    def hold(self, pid: int, *, inside: bool) -> LimitCheck:
        """Monitor the memory of a sandbox.

        If `inside` is True, `pid` is the first process in the namespace of a forked child.
        Otherwise it is the outer process of a sandbox.
        """
        ...


def not_wrapped(
    command: Sequence[str], *, readable: Sequence[Path]
) -> AbstractContextManager[SandboxLaunch]:
    """Run a command without a sandbox, with all permissions of the current user."""
    return nullcontext(_Bare(command))


class Child(Protocol):
    """A process that belongs to an episode.

    It is reaped only after its descendants are dead, so that its PID is not reused before.
    """

    pid: int
    limit_hit: str
    """The limit that ended its sandbox, or "". It is known once the process has been reaped."""
    orphaned: bool
    """True if the fork server was already dead when the process should have been reaped."""

    async def gone(self, within_s: float) -> bool:
        """Wait until the process exits, without reaping it. Returns False on timeout."""
        ...

    def kill(self) -> None:
        """Kill the process and its descendants."""
        ...

    async def reap(self) -> int | None:
        """Reap the process after `kill`.

        Returns the exit status, which is the negative signal number if a signal killed the process,
        or None if it is unknown.
        """
        ...


class StartedChild:
    """A process that this process has started.

    `limit` is set if it is the outer process of a sandbox.
    """

    def __init__(self, process: subprocess.Popen[bytes], limit: LimitCheck | None) -> None:
        self.pid = process.pid
        self.limit_hit, self.orphaned = "", False
        self._process, self.limit = process, limit
        # Kills the group at interpreter exit if an abandoned event loop never closed it.
        self._finalizer = weakref.finalize(self, _kill_group, process.pid)

    async def gone(self, within_s: float) -> bool:
        def has_exited() -> bool:
            try:
                flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
                return os.waitid(os.P_PID, self.pid, flags) is not None
            except ChildProcessError:
                return True

        return await _poll(has_exited, within_s)

    def kill(self) -> None:
        _kill_descendants(self.pid)
        if self.limit is None:
            _kill_group(self.pid)

    async def reap(self) -> int | None:
        if self.limit is not None:
            deadline = time.monotonic() + REAP_S
            while not await self.gone(0.05) and time.monotonic() < deadline:
                _kill_descendants(self.pid)  # the sandbox was still starting
            _kill_group(self.pid)
            self.limit_hit = self.limit()
        await self.gone(REAP_S)
        status = self._process.poll()
        if status is not None:
            self._finalizer.detach()
        return status


class ForkedChild:
    """A process that a fork server has forked and will reap.

    `limit` is set if it is the first process of a PID namespace. When that process ends, all others
    in the namespace are killed.
    """

    def __init__(
        self,
        pidfd: int,
        pid: int,
        reap: Callable[[], Awaitable[int | None]],
        limit: LimitCheck | None,
    ) -> None:
        self.pid = pid
        self.limit_hit, self.orphaned = "", False
        self._pidfd, self._reap, self._limit = pidfd, reap, limit
        self._finalizer = weakref.finalize(self, _kill_and_close, pidfd)

    async def gone(self, within_s: float) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return await _poll(lambda: bool(poll.poll(0)), within_s)

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
        except ProcessLookupError:  # reaped, since its parent has exited; so are its children
            return
        if self._limit is None:
            _kill_descendants(self.pid)
            _kill_group(self.pid)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def reap(self) -> int | None:
        try:
            if not await self.gone(REAP_S):
                return None
            status = await self._reap()
            self.orphaned = status is None
        finally:
            if self._limit is not None:
                self.limit_hit = self._limit()
            self._finalizer.detach()
            os.close(self._pidfd)
        return status


def _kill_and_close(pidfd: int) -> None:
    with suppress(OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


async def _poll(condition: Callable[[], bool], within_s: float) -> bool:
    deadline, pause_s = time.monotonic() + within_s, 0.001
    while not condition():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return True


def descendants(pid: int) -> list[int]:
    """Return the PIDs of all descendants of `pid` that can be found.

    This includes processes that have left its group, as long as their parents are alive.
    """
    pids: list[int] = []
    pending = [pid]
    while pending:
        folder = Path("/proc") / str(pending.pop()) / "task"
        with suppress(OSError):
            for task in os.listdir(folder):
                children = (folder / task / "children").read_bytes().split()
                pending += map(int, children)
                pids += map(int, children)
    return pids


def _kill_descendants(pid: int) -> None:
    for child in descendants(pid):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def encode_line(message: Mapping[str, Any]) -> bytes:
    """Encode a message as a line of JSON.

    Raises ValueError if the message cannot be converted to JSON.
    """
    try:
        return json.dumps(message, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from error


Result = TypeVar("Result")


async def with_deadline(timeout_s: float, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, and raise TimeoutError if it takes longer than `timeout_s`.

    Unlike `asyncio.timeout`, it still returns a result that arrived in time but was not read
    because the event loop was busy.
    """
    task = asyncio.ensure_future(work)
    try:
        for limit_s in (timeout_s, _READ_S):
            await asyncio.wait({task}, timeout=limit_s)
            if task.done():
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=_READ_S)
        if task.done() and not task.cancelled():
            task.exception()  # mark as retrieved, or asyncio logs it


class LineProcess:
    """A child process and the channel for messages to it.

    It belongs to one event loop and handles one exchange at a time.
    """

    def __init__(
        self,
        child: Child,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        output: OutputTail,
    ) -> None:
        self._child = child
        self._reader, self._writer, self._output = reader, writer, output
        self._end: asyncio.Task[str] | None = None

    @staticmethod
    async def start(
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        folder: Path | None,
        wrap: Wrap = not_wrapped,
        readable: Sequence[Path] = (),
    ) -> LineProcess:
        """Start a process.

        Raises EnvironmentLost if the program cannot be run, and OSError if this process has run out
        of file descriptors.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child, stderr = launch(
                    command, theirs, env=env, folder=folder, wrap=wrap, readable=readable
                )
        except BaseException:
            ours.close()
            raise
        return await LineProcess.attach(child, ours, stderr)

    @staticmethod
    async def attach(child: Child, channel: socket.socket, stderr: int) -> LineProcess:
        """Wrap a process that is already running.

        `stderr` is the read end of the pipe for its standard error.
        """
        channel.setblocking(False)
        output = OutputTail(stderr)
        try:
            reader, writer = await asyncio.open_unix_connection(
                sock=channel, limit=MAX_MESSAGE_BYTES
            )
        except BaseException:  # cancelled
            channel.close()
            output.close()
            child.kill()
            await asyncio.shield(child.reap())
            raise
        return LineProcess(child, reader, writer, output)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def output(self) -> str:
        """The last part of the process's standard error."""
        return self._output.text()

    async def send(self, line: bytes) -> None:
        """Send a line.

        Raises OSError if the process has closed its channel.
        """
        self._writer.write(line)
        await self._writer.drain()

    async def receive(self) -> dict[str, Any] | str:
        """Return the next message, or its text if it is not a JSON object.

        Raises ValueError if the message is too long, and EOFError if the process has closed its
        channel.
        """
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, dict):
            return cast(dict[str, Any], message)
        return line.decode(errors="replace").strip()

    async def lost(self, fault: Fault, during: str, message: str) -> EnvironmentLost:
        """End the process, and return an error with the cause and the last part of its output."""
        ending = await self.end(EXIT_S if fault == "exit" else 0.0)
        if fault == "exit":
            fault = "crash" if ending.startswith("was ended") else "exit"
            message = ending
        if self._child.orphaned:
            during, message = "parent", "the process that it was forked from has ended"
        if self._child.limit_hit:
            fault, message = "memory", self._child.limit_hit
        return EnvironmentLost(fault, during, message, self.output)

    async def end(self, within_s: float = 0.0) -> str:
        """Kill the process and its descendants.

        Returns how the process ended, if it exited within `within_s`. It is safe to call this more
        than once.
        """
        if self._end is None:
            self._end = asyncio.create_task(self._shut_down(within_s))
        return await asyncio.shield(self._end)

    async def _shut_down(self, within_s: float) -> str:
        ending = await end_child(self._child, within_s, self._output)
        self._writer.transport.abort()
        return ending


async def end_child(child: Child, within_s: float, output: OutputTail) -> str:
    """Kill and reap a child, and close its output. Returns how the child ended."""
    try:
        exited = await child.gone(within_s)
    finally:
        child.kill()
    status = await child.reap()
    await output.drain(0.2)
    output.close()
    if not exited or status is None:
        return "closed its output"
    number = -status if status < 0 else status - 128  # 128 + n from a sandbox's outer process
    known = number in set(signal.Signals)
    if status < 0 or (status > 128 and known):
        return f"was ended by {signal.Signals(number).name if known else f'signal {number}'}"
    return f"exited with status {status}"


def launch(
    command: Sequence[str],
    channel: socket.socket,
    *,
    env: Mapping[str, str],
    folder: Path | None,
    wrap: Wrap,
    readable: Sequence[Path],
) -> tuple[StartedChild, int]:
    """Start a process with `channel` as its standard input and output.

    Returns the process and the read end of its standard error. Raises the same errors as
    `LineProcess.start`.
    """
    stderr, write_end = os.pipe()
    inherited = {name: os.environ[name] for name in _INHERITED_ENV if name in os.environ}
    try:
        with wrap(command, readable=readable) as plan:
            process = subprocess.Popen(
                plan.command,
                stdin=channel.fileno(),
                stdout=channel.fileno(),
                stderr=write_end,
                env={**inherited, **plan.env, **env},
                cwd=folder,
                pass_fds=plan.pass_fds,
                start_new_session=True,
            )
            return StartedChild(process, plan.started(process.pid)), stderr
    except BaseException as error:
        os.close(stderr)
        if isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
            reason = f"cannot run {command[0]}: {error}"
            raise EnvironmentLost("start", "open", reason) from error
        raise
    finally:
        os.close(write_end)


class OutputTail:
    """Reads a pipe in the background and keeps the last few KiB."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._tail = b""
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        self._tail = (self._tail + data)[-_OUTPUT_BYTES:]
        if not data:
            self.close()

    def close(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._loop.remove_reader(self._fd)
            os.close(self._fd)

    async def drain(self, within_s: float) -> None:
        """Wait for the end of the pipe, which a descendant that escaped may keep open."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), within_s)

    def text(self) -> str:
        """Return the last part of the output without control characters, since the policy may have
        written some of it."""
        text = self._tail.decode(errors="replace").strip()
        return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)
