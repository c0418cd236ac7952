"""A process that speaks JSON lines, and whose end is certain.

For hundreds of them on one event loop: two descriptors each and no thread. (Python 3.11 gives every
process of `asyncio.create_subprocess_exec` a thread that waits for it.)
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from keel.agents.env_process.children import Child, Started
from keel.agents.types import EnvironmentLost, Fault

MOST_BYTES = 8 << 20
"""Of one message. An environment that says more at once is ended."""
MOST_WORDS = 4096
"""Bytes of standard error that are kept: the last."""
ENDING_S = 30.0
"""Wait for a process that closed its side to be gone by itself, which tells how it ended."""
READING_S = 1.0
"""After a deadline, for an answer that came before it while the event loop was busy."""
PASSED_ON = ("HOME", "LANG", "LC_ALL", "PATH", "TMPDIR", "TZ", "USER")
"""What an environment sees of this process's environment: no key and no token is among it."""


class Launch(Protocol):
    """A command line as it is to be started."""

    @property
    def command(self) -> Sequence[str]: ...

    @property
    def pass_fds(self) -> Sequence[int]: ...

    @property
    def env(self) -> Mapping[str, str]:
        """Instead of what is passed on of this process's environment."""
        ...

    def started(self, pid: int) -> Callable[[], str] | None:
        """Told the number of what was started. None: that is the program. Else it is a sandbox's
        outer process, which ends by itself after all that is inside; what is returned is called at
        its end, and says at which limit the sandbox was ended, or ""."""
        ...


@dataclass(frozen=True, slots=True)
class Bare:
    """A `Launch` without a sandbox."""

    command: Sequence[str]
    pass_fds: Sequence[int] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])

    def started(self, pid: int) -> None:
        return None


class Wrap(Protocol):
    """Puts a command line into a sandbox. What it opens for that may close once it is started."""

    def __call__(
        self, command: Sequence[str], *, readable: Sequence[Path]
    ) -> AbstractContextManager[Launch]:
        """readable: files and folders that the program needs beyond the system and its
        interpreter's own. Raises FileNotFoundError and PermissionError in words for the user."""
        ...


class ForkingWrap(Protocol):
    """A `Wrap` in which a process may fork others, each as isolated as one of its own would be."""

    @property
    def inner(self) -> Mapping[str, Any] | None:
        """What `keel.agents.env_runtime.isolate` is told. None: this machine does not let it."""
        ...

    @property
    def probe(self) -> str:
        """Code that looks for ways out, and prints `isolated` where it finds none."""
        ...

    def parent(
        self, command: Sequence[str], *, readable: Sequence[Path]
    ) -> AbstractContextManager[Launch]:
        """As a call. Nobody looks at its memory."""
        ...

    def hold(self, pid: int, *, inside: bool) -> Callable[[], str]:
        """As `Launch.started`. inside: of the first process of a forked one's namespace; else of
        the outer process of what `parent` is for."""
        ...


def not_wrapped(
    command: Sequence[str], *, readable: Sequence[Path]
) -> AbstractContextManager[Launch]:
    """No sandbox: the environment may do whatever this process's user may."""
    return nullcontext(Bare(command))


def line_of(message: Mapping[str, Any]) -> bytes:
    """As it is sent. Raises ValueError for what is no JSON."""
    try:
        return json.dumps(message, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from error


Answer = TypeVar("Answer")


async def within(timeout_s: float, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Its result. Raises TimeoutError. `asyncio.timeout` would, too, where the answer is here and
    has yet to be read, since the event loop was busy with other episodes."""
    task = asyncio.ensure_future(work)
    try:
        for limit_s in (timeout_s, READING_S):
            await asyncio.wait({task}, timeout=limit_s)
            if task.done():
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=READING_S)
        if task.done() and not task.cancelled():
            task.exception()  # or asyncio logs that nobody has looked


class LineProcess:
    """One child process and its group. For one event loop, and one exchange at a time."""

    def __init__(
        self,
        child: Child,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        words: Words,
    ) -> None:
        self._child = child
        self._reader, self._writer, self._words = reader, writer, words
        self._over = ""
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
        """Raises EnvironmentLost where there is nothing to start, and OSError out of files."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child, read_words = launch(
                    command, theirs, env=env, folder=folder, wrap=wrap, readable=readable
                )
        except BaseException:
            ours.close()
            raise
        return await LineProcess.of(child, ours, read_words)

    @staticmethod
    async def of(child: Child, ours: socket.socket, read_words: int) -> LineProcess:
        """Of a process that runs, its channel, and the pipe of its standard error."""
        ours.setblocking(False)
        words = Words(read_words)
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MOST_BYTES)
        except BaseException:  # given up meanwhile
            ours.close()
            words.close()
            child.kill()
            await asyncio.shield(child.reap())
            raise
        return LineProcess(child, reader, writer, words)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def words(self) -> str:
        """The last that the process printed to standard error."""
        return self._words.text()

    async def send(self, line: bytes) -> None:
        """Raises OSError where nobody listens."""
        self._writer.write(line)
        await self._writer.drain()

    async def receive(self) -> dict[str, Any] | str:
        """The next message; as text where it is none. Raises ValueError for one that is too long,
        EOFError where no more will come."""
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
        """End the process, and say what happened with its last words."""
        ended = await self.end(ENDING_S if fault == "exit" else 0.0)
        if fault == "exit":
            fault = "crash" if ended.startswith("was ended") else "exit"
            message = ended
        if self._child.orphaned:
            during, message = "parent", "the process that it was forked from has ended"
        if self._over:
            fault, message = "memory", self._over
        return EnvironmentLost(fault, during, message, self.words)

    async def end(self, within_s: float = 0.0) -> str:
        """Kill the group, its leader's children included. Says how the leader ended, if it did so
        by itself within `within_s`. Safe to call more than once."""
        if self._end is None:
            self._end = asyncio.create_task(self._ending(within_s))
        return await asyncio.shield(self._end)

    async def _ending(self, within_s: float) -> str:
        child = self._child
        try:
            by_itself = await child.gone(within_s)
        finally:
            child.kill()
        code = await child.reap()
        self._over = child.over
        await self._words.heard(0.2)
        self._words.close()
        self._writer.transport.abort()
        return how_it_ended(code if by_itself else None)


def how_it_ended(code: int | None) -> str:
    """code: its exit status, or minus a signal. None: it had not ended by itself."""
    if code is None:
        return "closed its output"
    if code < 0:
        return f"was ended by {_signal(-code)}"
    if code > 128 and code - 128 in set(signal.Signals):  # told by a sandbox's outer process
        return f"was ended by {_signal(code - 128)}"
    return f"exited with status {code}"


def _signal(number: int) -> str:
    """Its name; most of the real-time ones have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def launch(
    command: Sequence[str],
    channel: socket.socket,
    *,
    env: Mapping[str, str],
    folder: Path | None,
    wrap: Wrap,
    readable: Sequence[Path],
) -> tuple[Started, int]:
    """A process whose standard input and output are `channel`, and its standard error to read.
    Raises as `LineProcess.start`."""
    read_words, write_words = os.pipe()
    passed_on = {k: os.environ[k] for k in PASSED_ON if k in os.environ}
    try:
        with wrap(command, readable=readable) as given:
            process = subprocess.Popen(
                given.command,
                stdin=channel.fileno(),
                stdout=channel.fileno(),
                stderr=write_words,
                env={**passed_on, **given.env, **env},
                cwd=folder,
                pass_fds=given.pass_fds,
                start_new_session=True,
            )
            return Started(process, given.started(process.pid)), read_words
    except BaseException as error:
        os.close(read_words)
        if isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
            why = f"cannot run {command[0]}: {error}"
            raise EnvironmentLost("start", "open", why) from error
        raise
    finally:
        os.close(write_words)


class Words:
    """The end of what a process prints to the pipe `fd`, heard as long as the event loop runs."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._tail = b""
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._hear)

    def _hear(self) -> None:
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        self._tail = (self._tail + data)[-MOST_WORDS:]
        if not data:
            self.close()

    def close(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._loop.remove_reader(self._fd)
            os.close(self._fd)

    async def heard(self, within_s: float) -> None:
        """Wait for the end. What has fled from the group may hold the pipe open."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), within_s)

    def text(self) -> str:
        """For a terminal: a policy's text may be in there, and escape sequences in that."""
        text = self._tail.decode(errors="replace").strip()
        return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)
