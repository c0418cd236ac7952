"""A process that has loaded a program and forks a process for each of its episodes, seen from Keel.

What takes most of an episode's start, importing, is done once. Where forking is not safe (importing
the module starts threads, opens files) or the sandbox cannot be had for a forked process, each
episode has a process of its own from the start, as without a parent.
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

from keel.agents.env_process.children import REAPING_S, Forked, Started
from keel.agents.env_process.process import (
    ENDING_S,
    ForkingWrap,
    LineProcess,
    Words,
    Wrap,
    how_it_ended,
    launch,
    not_wrapped,
    within,
)
from keel.agents.types import EnvironmentLost, Fault

MOST_REPLY = 1 << 16
Reply = dict[str, Any]


class ForkServer:
    """For one event loop. Starts with the first fork, anew where it was lost, and ends by `close`.

    load: request that loads the program (`keel.agents.env_runtime.fork_server`). timeout_s: for
    loading, and for each fork.
    """

    def __init__(
        self,
        command: Sequence[str],
        load: Reply,
        *,
        env: Mapping[str, str],
        folder: Path,
        wrap: Wrap,
        readable: Sequence[Path],
        timeout_s: float,
    ) -> None:
        self._command, self._load, self._env = command, load, env
        self._folder, self._readable, self._timeout_s = folder, readable, timeout_s
        self._wrap: Wrap = wrap
        self._inner: Mapping[str, Any] | None = None
        self._sandbox: ForkingWrap | None = None
        self.why_not = ""
        """Why episodes are not forked; "" while nothing is against it."""
        if wrap is not not_wrapped:
            self._inner = getattr(wrap, "inner", None)
            if self._inner is None:
                self.why_not = "the sandbox cannot be had for a forked process on this machine"
            else:
                self._sandbox = cast(ForkingWrap, wrap)
                self._wrap = self._sandbox.parent
        self._running: _Running | None = None
        self._not_loaded: EnvironmentLost | None = None
        """What the last try to load it came to, of which all learn who waited for it meanwhile."""
        self._gate = asyncio.Lock()
        self._ends: set[asyncio.Task[Any]] = set()

    async def fork(self, env: Mapping[str, str]) -> LineProcess | None:
        """A process in which the program is loaded; None where it must be started by itself. env:
        added to its environment variables. Raises EnvironmentLost where loading fails."""
        task = asyncio.create_task(self._fork(env))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            end = asyncio.create_task(_given_up(task))
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)
            raise

    async def _fork(self, env: Mapping[str, str]) -> LineProcess | None:
        if self.why_not:
            return None
        before = self._not_loaded
        async with self._gate:
            if self.why_not:  # meanwhile
                return None
            if self._running is None:
                if (told := self._not_loaded) is not None and told is not before:
                    raise EnvironmentLost(told.fault, told.during, told.detail, told.words)
                await self._start()
            if self._running is None:
                return None
            try:
                made = await self._running.fork(self._inner, env, self._hold())
            except _Cannot as error:  # the machine was out of something; the next may be luckier
                raise _not_forked(error) from error
            except (TimeoutError, OSError, EOFError, ValueError) as error:
                raise await self._lost(error) from error
        return await LineProcess.of(*made)

    def _hold(self) -> Callable[[int], Callable[[], str]] | None:
        return None if self._sandbox is None else partial(self._sandbox.hold, inside=True)

    async def _start(self) -> None:
        self._running = running = await _Running.start(
            self._command,
            env=self._env,
            folder=self._folder,
            wrap=self._wrap,
            readable=self._readable,
            timeout_s=self._timeout_s,
        )
        try:
            if self._sandbox is not None:
                await self._try_out(running, self._sandbox)
                running.limit(self._sandbox)
            await running.ask(self._load)
            running.loaded()
        except _Cannot as error:
            self.why_not = str(error)
            self._running = None
            await running.end()
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            self._not_loaded = await self._lost(error)
            raise self._not_loaded from error
        except BaseException:
            self._running = None
            await running.end()
            raise

    async def _try_out(self, running: _Running, sandbox: ForkingWrap) -> None:
        """Raises _Cannot where what it forks is not isolated."""
        try:
            made = await running.fork(self._inner, {}, None, run=sandbox.probe)
            tried = await LineProcess.of(*made)
            ended = await tried.end(within_s=self._timeout_s)
            said = tried.words or ended
        except _Cannot as error:
            said = str(error)
        except (EOFError, OSError) as error:
            said = f"{await running.end(ENDING_S)}: {running.words or error}"
        if said != "isolated":
            raise _Cannot(f"a sandbox for a forked process does not work here: {said}")

    async def _lost(self, error: BaseException) -> EnvironmentLost:
        """It is of no more use, and its children end with it."""
        running, self._running = self._running, None
        assert running is not None
        fault: Fault = "hang" if isinstance(error, TimeoutError) else "exit"
        message = f"open did not end within {self._timeout_s:g} s" if fault == "hang" else ""
        if isinstance(error, _Refused):
            fault, message = error.fault, str(error)
        if fault == "memory":
            message += f" (memory_mib = {self._load['memory_mib']})"
        ended = await running.end(ENDING_S if fault == "exit" else 0.0)
        if fault == "exit":
            fault = "crash" if ended.startswith("was ended") else "exit"
            message = ended
        if running.over:
            fault, message = "memory", running.over
        target = self._load["target"]
        return EnvironmentLost(fault, "open", f"{target}: {message}", running.words)

    async def close(self) -> None:
        """With all that it has forked."""
        self.why_not = self.why_not or "closed"
        async with self._gate:
            running, self._running = self._running, None
            if running is not None:
                await running.end()
        await asyncio.gather(*self._ends, return_exceptions=True)


async def _given_up(task: asyncio.Task[LineProcess | None]) -> None:
    made = (await asyncio.gather(task, return_exceptions=True))[0]
    if isinstance(made, LineProcess):
        await made.end()


class _Cannot(Exception):
    """Not by forking. Says why."""


class _Refused(ValueError):
    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault


class _Running:
    """The process, and one exchange with it at a time."""

    def __init__(
        self, child: Started, control: socket.socket, words: Words, timeout_s: float
    ) -> None:
        self._child, self._control, self._words = child, control, words
        self._timeout_s = timeout_s
        self._number = 0
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
    ) -> _Running:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                child, read_words = launch(
                    command, theirs, env=env, folder=folder, wrap=wrap, readable=readable
                )
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        return _Running(child, ours, Words(read_words), timeout_s)

    @property
    def words(self) -> str:
        return self._words.text()

    @property
    def over(self) -> str:
        return self._child.over

    def limit(self, sandbox: ForkingWrap) -> None:
        """Of the memory that loading takes."""
        self._child.limit(sandbox.hold(self._child.pid, inside=False))

    def loaded(self) -> None:
        """What it forks has its own limit of memory."""
        self._child.release()

    async def ask(
        self, request: Reply, *fds: int, timeout_s: float | None = None
    ) -> tuple[Reply, list[int]]:
        """Raises _Cannot, _Refused, TimeoutError, EOFError, OSError."""
        async with self._gate:
            self._number += 1
            line = json.dumps({"id": self._number, **request}).encode()
            socket.send_fds(self._control, [line], fds)
            reply, given = await within(timeout_s or self._timeout_s, self._heard())
        if "cannot" in reply:
            raise _Cannot(str(reply["cannot"]))
        if "memory" in reply:
            raise _Refused("memory", "out of memory")
        if "refused" in reply:
            raise _Refused("start", str(reply["refused"]))
        if "raised" in reply:
            at = f" ({reply['at']})" if reply.get("at") else ""
            raise _Refused("raised", f"{reply['raised']}{at}")
        return reply["is"], given

    async def _heard(self) -> tuple[Reply, list[int]]:
        loop = asyncio.get_running_loop()
        while True:
            ready = loop.create_future()
            loop.add_reader(self._control, lambda: ready.done() or ready.set_result(None))  # noqa: B023
            try:
                await ready
            finally:
                loop.remove_reader(self._control)
            line, fds, _, _ = socket.recv_fds(self._control, MOST_REPLY, 1)
            if not line:
                raise EOFError
            reply = json.loads(line)
            if reply["id"] == self._number:
                return reply, fds
            for fd in fds:  # what somebody did not wait for
                os.close(fd)

    async def fork(
        self,
        inner: Mapping[str, Any] | None,
        env: Mapping[str, str],
        hold: Callable[[int], Callable[[], str]] | None,
        *,
        run: str | None = None,
    ) -> tuple[Forked, socket.socket, int]:
        """What `LineProcess.of` takes. Raises as `ask`, and EnvironmentLost where this process is
        out of files, which is nothing against the one that forks."""
        ours, theirs, read_words, write_words = _channel()
        request = {"do": "fork", "inner": inner, "env": dict(env), "run": run}
        try:
            made, fds = await self.ask(request, theirs.fileno(), write_words)
        except BaseException:
            ours.close()
            os.close(read_words)
            raise
        finally:
            theirs.close()
            os.close(write_words)
        reap = partial(self._reap, made["pid"])
        try:
            if not fds:  # the system leaves out what there is no room for
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            fd = fds[0]
            pid = _number_here(fd)
            limit = hold(pid) if hold is not None else None
        except OSError as error:
            ours.close()  # with which it ends
            for end in (read_words, *fds):
                os.close(end)
            await reap()
            raise _not_forked(error) from error
        return Forked(fd, pid, reap, limit), ours, read_words

    async def _reap(self, pid: int) -> int | None:
        try:
            reply, _ = await self.ask({"do": "reap", "pid": pid}, timeout_s=REAPING_S)
        except (_Cannot, TimeoutError, EOFError, OSError, ValueError):  # gone itself
            return None
        return reply["status"]

    async def end(self, within_s: float = 0.0) -> str:
        """With all that it has forked. Says how it ended, if by itself within `within_s`."""
        if self._end is None:
            self._end = asyncio.create_task(self._ending(within_s))
        return await asyncio.shield(self._end)

    async def _ending(self, within_s: float) -> str:
        by_itself = await self._child.gone(within_s)
        self._child.kill()
        code = await self._child.reap()
        await self._words.heard(0.2)
        self._words.close()
        self._control.close()
        return how_it_ended(code if by_itself else None)


def _channel() -> tuple[socket.socket, socket.socket, int, int]:
    """Both ends of a forked process's channel, and of its standard error. Raises
    EnvironmentLost."""
    try:
        ours, theirs = socket.socketpair()
        try:
            return ours, theirs, *os.pipe()
        except OSError:
            ours.close()
            theirs.close()
            raise
    except OSError as error:
        raise _not_forked(error) from error


def _not_forked(error: Exception) -> EnvironmentLost:
    return EnvironmentLost("start", "open", f"cannot be forked: {error}")


def _number_here(fd: int) -> int:
    """Of the process of a pidfd, as it is called in this process's namespace."""
    told = Path(f"/proc/self/fdinfo/{fd}").read_text()
    found = re.search(r"^Pid:\s+(-?\d+)$", told, re.MULTILINE)
    return int(found[1]) if found else -1
