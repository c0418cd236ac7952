"""The settings of the programs of episodes, and their processes. Processes exchange JSON lines with
Keel and are killed together with their descendants. One event loop manages hundreds of them. Each
needs a few file descriptors and no thread."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

import keel
from keel.agents.env_runtime.processes import descendants
from keel.agents.types import EnvironmentLost
from keel.rl.supervisor import EXIT_S, GRACE_S, KILL_S

MAX_MESSAGE_BYTES = 8 << 20
_OUTPUT_BYTES = 4096
_READ_S = 1.0
_INHERITED_ENV = ("HOME", "LANG", "LC_ALL", "PATH", "TMPDIR", "TZ", "USER")
"""The only variables that an environment inherits, so that it cannot see keys or tokens."""

_LimitCheck = Callable[[], str]
"""Stops monitoring a sandbox's memory. Returns the limit that the sandbox exceeded, or "" if it
exceeded none."""


class EnvSandbox(Protocol):
    """Interface for the sandboxes that environments run in. A sandboxed process can read only
    system files, its own program and the paths in `readable`.

    Calling it yields the command line that starts a sandbox, environment variables that override
    inherited ones, and file descriptors to pass. `forks` starts a sandbox for a process that forks
    children and isolates them from each other.
    `fork_isolation` holds the settings that the fork server needs to isolate children, or None if
    this machine doesn't support it. `probe` is Python code that tries to escape and prints
    `isolated` if it can't. `limit_memory` kills the sandbox if it uses too much memory, given its
    outer process. If `inside` is set, it limits a forked child, given the first process in the
    child's namespace.
    """

    @property
    def fork_isolation(self) -> Mapping[str, Any] | None: ...

    @property
    def probe(self) -> str: ...

    def __call__(
        self, command: Sequence[str], *, readable: Sequence[Path], forks: bool = False
    ) -> AbstractContextManager[tuple[Sequence[str], Mapping[str, str], Sequence[int]]]: ...

    def limit_memory(self, pid: int, *, inside: bool) -> _LimitCheck: ...


class ChildProcess:
    """An episode's process, with its message channel and the tail of its standard error. Use it
    from a single event loop, for one exchange at a time. `status` reaps the process, so it is
    called only after all descendants are dead. Otherwise, the PID could be reused too early.
    `exits_last` is set for the outer process of a sandbox, which is never killed itself, because it
    reports how the process inside ended. `scratch` is a folder to remove at the end."""

    def __init__(
        self,
        pid: int,
        channel: socket.socket,
        stderr: int,
        *,
        pidfd: int,
        status: Callable[[], Awaitable[int | None]],
        scratch: str = "",
        exits_last: bool = False,
        limit: _LimitCheck | None = None,
    ) -> None:
        self.pid, self.channel, self.limit, self.scratch = pid, channel, limit, scratch
        self._pidfd, self._status, self._exits_last = pidfd, status, exits_last
        self._output = _OutputTail(stderr)
        self._close: Callable[[], None] = channel.close
        self._end: asyncio.Task[str] | None = None
        self._limit_hit = ""
        self._orphaned = False
        # Kills it at interpreter exit if an abandoned event loop never closed it.
        self._finalizer = weakref.finalize(self, _kill_abandoned, pid, pidfd)

    async def connect(self) -> ChildProcess:
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(
                sock=self.channel, limit=MAX_MESSAGE_BYTES
            )
        except BaseException:  # cancelled
            await asyncio.shield(self.end())
            raise
        self._close = self._writer.transport.abort
        return self

    async def exchange(self, line: bytes) -> dict[str, Any] | str:
        await self.send(line)
        return await self.receive()

    async def send(self, line: bytes) -> None:
        self._writer.write(line)
        await self._writer.drain()

    async def receive(self) -> dict[str, Any] | str:
        """Return the next message as a dict, or as text if it isn't a JSON object. Raises
        ValueError if it is too long, and EOFError at the end of the channel."""
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        with suppress(ValueError, RecursionError):
            message = json.loads(line)
            if isinstance(message, dict):
                return cast(dict[str, Any], message)
        return line.decode(errors="replace").strip()

    @property
    def output(self) -> str:
        return self._output.text()

    async def lost(self, during: str, message: str = "") -> EnvironmentLost:
        """End the process and return the error to raise. Without a `message`, the process has
        closed its channel, and how it exits is the reason."""
        ending = await self.end(0.0 if message else EXIT_S)
        if self._orphaned:
            during, message = "parent", "the process that it was forked from has ended"
        return EnvironmentLost(during, self._limit_hit or message or ending, self.output)

    async def end(self, within_s: float = 0.0) -> str:
        """Give the process up to `within_s` seconds to exit, then kill it along with its
        descendants. Returns a description of how it exited."""
        if self._end is None:
            self._end = asyncio.create_task(self._shut_down(within_s))
        return await asyncio.shield(self._end)

    async def _shut_down(self, within_s: float) -> str:
        try:
            exited = await self._gone(within_s)
        finally:
            self._kill()
        status = await self._reap()
        await self._output.drain(0.2)
        self._output.close()
        self._close()
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)
        if not exited or status is None:
            return "closed its output"
        number = -status if status < 0 else status - 128  # 128 + n from a sandbox's first process
        if number in set(signal.Signals):
            return f"was ended by {signal.Signals(number).name}"
        return f"exited with status {status}"

    async def _gone(self, within_s: float) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        deadline, pause_s = time.monotonic() + within_s, 0.001
        while not poll.poll(0):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return True

    def _kill(self) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
        except ProcessLookupError:  # reaped by a parent that has exited; so are its children
            return
        for child in descendants(self.pid):
            _kill(os.kill, child)
        if not self._exits_last:
            _kill(os.killpg, self.pid)
            _kill(signal.pidfd_send_signal, self._pidfd)

    async def _reap(self) -> int | None:
        deadline = time.monotonic() + KILL_S
        while not (gone := await self._gone(0.05)) and time.monotonic() < deadline:
            self._kill()  # a sandbox that was still starting
        if self._exits_last:
            _kill(os.killpg, self.pid)
        try:
            status = await self._status() if gone else None
            self._orphaned = gone and status is None
            return status
        finally:
            if self.limit is not None:
                self._limit_hit = self.limit()
            if self._finalizer.detach():
                os.close(self._pidfd)


def _kill(send: Callable[[int, int], None], target: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        send(target, signal.SIGKILL)


def _kill_abandoned(pid: int, pidfd: int) -> None:
    with suppress(OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.killpg(pid, signal.SIGKILL)
        os.close(pidfd)


def encode_line(message: Mapping[str, Any]) -> bytes:
    """Encode a message as a single line of JSON. Raises ValueError if that isn't possible."""
    try:
        return json.dumps(message, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from error


_Result = TypeVar("_Result")


async def with_deadline(timeout_s: float, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Await `work` for up to `timeout_s` seconds. Unlike `asyncio.timeout`, it still returns a
    result that was ready in time, even if a busy event loop gets to it late."""
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


@contextmanager
def open_channel(
    kind: socket.SocketKind, *, private: bool
) -> Generator[tuple[socket.socket, socket.socket, int, int, str]]:
    """Yield both ends of a socket pair, both ends of a pipe, and the path of a new temporary folder
    if the process is to have a `private` one. The second end of each pair is for the process and is
    closed when the context exits. If an error occurs, everything is closed and removed."""
    with ExitStack() as undo:
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        undo.callback(ours.close)
        ours.setblocking(False)
        with theirs:
            read_end, write_end = os.pipe()
            undo.callback(os.close, read_end)
            scratch = tempfile.mkdtemp(prefix="keel-") if private else ""
            undo.callback(shutil.rmtree, scratch, ignore_errors=True)
            try:
                yield ours, theirs, read_end, write_end, scratch
            finally:
                os.close(write_end)
        undo.pop_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings for the processes of an environment or an agent program."""

    folder: Path | None = None
    """Working directory, which is also the first folder that is searched for modules. None means
    the current directory."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    readable: Sequence[Path] = ()
    """Paths that the process may read in a sandbox, besides its folder and interpreter."""
    sandbox: EnvSandbox | None = None
    open_s: float = 60.0
    """Time limit in seconds for the start. An agent program requests its first turn within it. The
    next three limits are for an environment's methods, and tool calls have their own."""
    reply_s: float = 30.0
    verdict_s: float = 60.0
    close_s: float = GRACE_S

    def __post_init__(self) -> None:
        if self.folder is not None and not self.folder.is_dir():
            raise ValueError(f"folder {self.folder} does not exist")


def launch(
    command: Sequence[str],
    settings: ProcessSettings,
    *,
    env: Mapping[str, str],
    readable: Sequence[Path] = (),
    forks: bool = False,
) -> ChildProcess:
    """Start a process that exchanges messages over its standard input and output. With `forks`, it
    is a fork server. Without a sandbox, it gets a new temporary folder. Raises
    EnvironmentLost if the program can't be run, and OSError if this process has run out of file
    descriptors."""
    inherited = {name: os.environ[name] for name in _INHERITED_ENV if name in os.environ}
    kind = socket.SOCK_SEQPACKET if forks else socket.SOCK_STREAM
    sandbox = settings.sandbox
    readable = (*readable, *settings.readable)
    with (
        open_channel(kind, private=sandbox is None) as (ours, theirs, stderr, write_end, scratch),
        ExitStack() as undo,
    ):
        command_line = nullcontext((command, {"TMPDIR": scratch}, ()))
        try:
            if sandbox is not None:
                command_line = sandbox(command, readable=readable, forks=forks)
            with command_line as (words, base, fds):
                process = subprocess.Popen(
                    words,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=write_end,
                    env={**inherited, **base, **env, **settings.env},
                    cwd=settings.folder,
                    pass_fds=fds,
                    start_new_session=True,
                )
                undo.callback(process.wait)
                undo.callback(process.kill)
                limit = None
                if sandbox is not None and not forks:
                    limit = sandbox.limit_memory(process.pid, inside=False)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            reason = f"cannot run {command[0]}: {error}"
            raise EnvironmentLost("open", reason) from error
        pidfd = os.pidfd_open(process.pid)
        undo.pop_all()

    async def status() -> int | None:
        return process.poll()

    return ChildProcess(
        process.pid,
        ours,
        stderr,
        pidfd=pidfd,
        status=status,
        scratch=scratch,
        exits_last=sandbox is not None,
        limit=limit,
    )


class _OutputTail:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._tail = b""
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            data = os.read(self._fd, 1 << 16)
            self._tail = (self._tail + data)[-_OUTPUT_BYTES:]
            if not data:
                self.close()

    def close(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._loop.remove_reader(self._fd)
            os.close(self._fd)

    async def drain(self, within_s: float) -> None:
        """Wait up to `within_s` seconds until the pipe reaches end of file. A descendant that has
        escaped can keep the pipe open."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), within_s)

    def text(self) -> str:
        text = self._tail.decode(errors="replace").strip()
        return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


KEEL = Path(keel.__file__).resolve().parent  # not through a link: the sandbox has the folder
START = KEEL / "agents" / "env_runtime" / "start.py"
READABLE = tuple(dict.fromkeys((KEEL, START.resolve().parents[1])))
"""The parts of Keel that an environment needs to read. In a checkout, `keel/agents` is a link."""
BASE_ENV = {
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONNOUSERSITE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONUTF8": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentProgram(ProcessSettings):
    """Settings for running an environment, shared by all episodes: a `target` in Python, or the
    `command` or `url` of an MCP server. The fields from `kind` on apply only to a `target`."""

    command: Sequence[str] = ()
    """The command that starts the MCP server of an episode. `{seed}` is replaced by the seed."""
    url: str = ""
    target: str = ""
    """The class (`my_env:Shop`, `/path/to/file.py:Shop`), the module of functions (`my_tools`) or
    the address of an OpenEnv server (`http://…`)."""
    kind: Literal["auto", "class", "functions", "game", "openenv"] = "auto"
    """The kind of target. `auto` means `openenv` for an address or an OpenEnv class, `game` for a
    class with `reset` and `step`, `class` for any other class, and `functions` for everything else.
    """
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments for the class, and for the adapter of a game
    (`keel.agents.env_runtime.games`)."""
    python: str = sys.executable
    """Python interpreter (3.9 or later) for the environment. It does not need to have Keel
    installed."""
    preload: bool = True
    """Import the module once and fork a process for each episode, if this is safe."""
    memory_mib: int | None = 4096

    def __post_init__(self) -> None:
        ProcessSettings.__post_init__(self)
        if sum(map(bool, (self.target, self.command, self.url))) != 1:
            raise ValueError("environment: set one of target, command and url")
        if self.target.startswith(":"):
            raise ValueError(f"target = {self.target!r}; write module:name")
        if self.arguments and not self.target:
            raise ValueError("arguments: only a target takes arguments")
        if not self.target and find_spec("mcp") is None:
            raise ValueError("MCP server: the package is missing; pip install 'mcp>=2,<3'")
        try:
            encode_line(self.arguments)
        except ValueError as error:
            raise ValueError(f"arguments: {error}") from error

    @property
    def name(self) -> str:
        return self.target or self.url or " ".join(self.command)

    def as_json(self) -> dict[str, Any]:
        """Return the fields that an environment is loaded from inside its process."""
        return {
            "target": self.target,
            "kind": self.kind,
            "arguments": dict(self.arguments),
            "paths": [str((self.folder or Path.cwd()).absolute())],
            "memory_mib": self.memory_mib,
        }

    def launch(self, function: str, *, forks: bool = False) -> ChildProcess:
        """Start a function of `keel.agents.env_runtime` with the environment's interpreter."""
        folder = self.folder or Path.cwd()
        file = folder / self.target.partition(":")[0]
        files = [file] if file.name.endswith(".py") and file.is_file() else []
        command, readable = [self.python, str(START), function], (*READABLE, folder, *files)
        return launch(command, self, env=BASE_ENV, readable=readable, forks=forks)


_RESERVED_ENV = (
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"),
    *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "KEEL_MCP_URL"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProgram(ProcessSettings):
    """Settings for running an agent program, shared by all trajectories."""

    command: Sequence[str]
    """The command line. `{prompt}` is replaced by the last user message, and `{prompt_file}` by the
    path of a file that contains it."""
    python: str = sys.executable
    memory_mib: int | None = None
    tells_reward: bool = False
    """Include the inputs of the reward, such as the right answer, in KEEL_TASK. The policy may be
    able to read them there."""
    drop_failures: bool = False
    """Drop the trajectory if its program fails. Otherwise, this counts as a failure of the
    policy."""
    judges: bool = True
    """Use the verdict that the program writes. A policy that can run commands could forge it."""

    def __post_init__(self) -> None:
        ProcessSettings.__post_init__(self)
        if reserved := [name for name in self.env if name in _RESERVED_ENV]:
            raise ValueError(f"agent program: env must not set {reserved[0]}, which Keel sets")

    @property
    def name(self) -> str:
        is_function = str(START) in self.command
        return self.command[-1] if is_function else self.command[0]
