"""Processes of episodes as Keel holds them: one that it started, or one that a parent forked.

Neither is reaped before all that is below it was killed, so that no number is another process's.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import time
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

REAPING_S = 60.0
"""Longest wait for a killed process to be gone."""


class Child(Protocol):
    pid: int
    over: str
    """At which limit a sandbox was ended, once it has been reaped; else ""."""
    orphaned: bool
    """Whether what had forked it was gone when it was to be reaped: no doing of its own."""

    async def gone(self, within_s: float) -> bool:
        """Whether it has ended by then. It is not reaped."""
        ...

    def kill(self) -> None:
        """With all that is below it."""
        ...

    async def reap(self) -> int | None:
        """After `kill`. Its exit status, or minus the signal that ended it; None: not known."""
        ...


class Started:
    """A process that was started here. limit: it is the outer process of a sandbox."""

    def __init__(self, process: subprocess.Popen[bytes], limit: Callable[[], str] | None) -> None:
        self.pid = process.pid
        self.over, self.orphaned = "", False
        self._process, self._limit = process, limit
        # Where nobody closes it (an event loop that was given up), the interpreter's end does.
        self._forgotten = weakref.finalize(self, kill_group, process.pid)

    def limit(self, limit: Callable[[], str]) -> None:
        """Of a sandbox, another than it had."""
        self._limit = limit

    def release(self) -> None:
        """Its memory is looked at no more."""
        if self._limit is not None:
            self._limit()

    async def gone(self, within_s: float) -> bool:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT

        def ended() -> bool:
            try:
                return os.waitid(os.P_PID, self.pid, flags) is not None
            except ChildProcessError:
                return True

        return await _by_then(ended, within_s)

    def kill(self) -> None:
        kill_below(self.pid)
        if self._limit is None:
            kill_group(self.pid)

    async def reap(self) -> int | None:
        if self._limit is not None:
            until = time.monotonic() + REAPING_S
            while not await self.gone(0.05) and time.monotonic() < until:
                kill_below(self.pid)  # it was still being started
            kill_group(self.pid)
            self.over = self._limit()
        await self.gone(REAPING_S)
        code = self._process.poll()
        if code is not None:
            self._forgotten.detach()
        return code


class Forked:
    """A process that a parent process forked. `pid`: here; reap: by the parent. limit: it is the
    first process of its own namespace, with which all others there end."""

    def __init__(
        self,
        fd: int,
        pid: int,
        reap: Callable[[], Awaitable[int | None]],
        limit: Callable[[], str] | None,
    ) -> None:
        self.pid = pid
        self.over, self.orphaned = "", False
        self._fd, self._reap, self._limit = fd, reap, limit
        self._forgotten = weakref.finalize(self, _forget, fd)

    async def gone(self, within_s: float) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return await _by_then(lambda: bool(poll.poll(0)), within_s)

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self._fd, 0)
        except ProcessLookupError:  # reaped, for its parent has gone: so have its children
            return
        if self._limit is None:
            kill_below(self.pid)
            kill_group(self.pid)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    async def reap(self) -> int | None:
        try:
            if not await self.gone(REAPING_S):
                return None
            code = await self._reap()
            self.orphaned = code is None
        finally:
            if self._limit is not None:
                self.over = self._limit()
            self._forgotten.detach()
            os.close(self._fd)
        return code


def _forget(fd: int) -> None:
    with suppress(OSError):
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)


async def _by_then(ended: Callable[[], bool], within_s: float) -> bool:
    until, pause = time.monotonic() + within_s, 0.001
    while not ended():
        if time.monotonic() >= until:
            return False
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


def below(pid: int) -> list[int]:
    """Processes under `pid`, those that left its group included, as long as their parents live."""
    found: list[int] = []
    pending = [pid]
    while pending:
        folder = Path("/proc") / str(pending.pop()) / "task"
        with suppress(OSError):
            for task in os.listdir(folder):
                children = (folder / task / "children").read_bytes().split()
                pending += map(int, children)
                found += map(int, children)
    return found


def kill_below(pid: int) -> None:
    for child in below(pid):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)


def kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
