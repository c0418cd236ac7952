"""Measures and reaps the process trees of sandboxes, and limits their memory."""

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from keel.rl.supervisor import KILL_S, read_stat, walk_tree

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_POLL_S = 0.1
_CPU_SHARE = 0.1  # maximum fraction of a core for polling. Many sandboxes are polled less often.


class _ProcessUsage(NamedTuple):
    resident: int  # bytes. A page that several processes share is counted for each of them.
    cpu_s: float  # user and system time, also of children that have exited and were reaped
    processes: int


def measure_processes(root: int, *, include_root: bool = True) -> _ProcessUsage:
    """Measure the memory, CPU time and number of processes below `root`, including `root` itself if
    `include_root` is set. Raises OSError if this process runs out of file descriptors or memory."""
    resident = ticks = processes = 0
    for pid, fields, tasks in walk_tree(root):
        if pid == root and not include_root:
            continue
        # Fields 14 to 17 (utime, stime, cutime, cstime) and 24 (rss) of proc(5); ours start at 3.
        ticks += sum(int(value) for value in fields[11:15])
        pages = int(fields[21])
        if fields[0] == b"Z":  # its main thread has exited, but others may hold memory
            for task in tasks:
                with suppress(FileNotFoundError, ProcessLookupError):
                    pages = max(pages, int(read_stat(f"{pid}/task/{task}")[21]))
        resident += pages * _PAGE
        processes += 1
    return _ProcessUsage(resident=resident, cpu_s=ticks / _TICKS, processes=processes)


_PR_SET_CHILD_SUBREAPER = 36
_subreapers = 0
_subreaper_lock = threading.Lock()


@contextmanager
def adopt_orphans() -> Generator[None]:
    """Make this process adopt orphaned descendants. In many containers, the first process would
    never reap them."""
    global _subreapers
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    with _subreaper_lock:
        if _subreapers == 0 and prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        _subreapers += 1
    try:
        yield
    finally:
        with _subreaper_lock:
            _subreapers -= 1
            if _subreapers == 0:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def reap(pid: int) -> bool:
    """Wait for a killed process to exit, and reap it if it is a child of this process. Returns
    False on timeout.

    The first process in a PID namespace doesn't exit until all others in the namespace have.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if not _has_exited(fd, KILL_S):
            return False
    finally:
        os.close(fd)
    with suppress(ChildProcessError):  # its own parent may have reaped it
        os.waitpid(pid, os.WNOHANG)
    return True


def _has_exited(pidfd: int, within_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


@dataclass(frozen=True, slots=True, eq=False)
class _Limit:
    pid: int
    pidfd: int  # refers to the process even if its PID is reused
    memory_mib: int
    inside: bool  # True if the process is the first one inside a sandbox


class _MemoryLimiter:
    """Kills sandboxes that exceed their memory limits. A single thread monitors all sandboxes, and
    ends with the last one."""

    def __init__(self) -> None:
        self._limits: dict[_Limit, str] = {}  # to the reason why the sandbox was killed
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, pid: int, memory_mib: int | None, *, inside: bool = False) -> Callable[[], str]:
        """Limit the memory of a sandbox. `pid` is its outer process or, if `inside` is set, the
        first process in a forked sandbox, whose own memory isn't counted. Returns a function that
        removes the limit and returns why the sandbox was killed, or "" if it wasn't."""
        if memory_mib is None:
            return lambda: ""
        try:
            limit = _Limit(pid, os.pidfd_open(pid), memory_mib, inside)
        except ProcessLookupError:
            return lambda: ""
        with self._lock:
            self._limits[limit] = ""
            if self._thread is None or not self._thread.is_alive():  # after a fork
                self._thread = threading.Thread(target=self._run, name="sandboxes", daemon=True)
                self._thread.start()
        return partial(self._remove, limit)

    def _remove(self, limit: _Limit) -> str:
        with self._lock:
            if limit not in self._limits:
                return ""
            os.close(limit.pidfd)
            return self._limits.pop(limit)

    def _run(self) -> None:
        while True:
            started = time.monotonic()
            with self._lock:
                if not self._limits:
                    self._thread = None
                    return
                limits = [limit for limit, reason in self._limits.items() if not reason]
            for limit in limits:
                with suppress(OSError):  # out of open files or memory: retried
                    self._poll(limit)
            time.sleep(max(_POLL_S, (time.monotonic() - started) / _CPU_SHARE))

    def _poll(self, limit: _Limit) -> None:
        used = measure_processes(limit.pid, include_root=not limit.inside)
        if used.resident <= limit.memory_mib << 20:
            return
        with self._lock:
            # Removed meanwhile, or the PID may belong to another process by now.
            if limit not in self._limits or _has_exited(limit.pidfd, 0):
                return
            _kill_sandbox(limit.pid, inside=limit.inside)
            self._limits[limit] = (
                f"out of memory: its {used.processes} processes use {used.resident >> 20} MiB "
                f"together, the limit is {limit.memory_mib}"
            )


def _kill_sandbox(pid: int, *, inside: bool) -> None:
    """Kill the first process inside a sandbox, which takes down all other processes in it."""
    with suppress(FileNotFoundError, ProcessLookupError):
        if inside:
            os.kill(pid, signal.SIGKILL)
            return
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_bytes().split():
                os.kill(int(child), signal.SIGKILL)


MEMORY_LIMITER = _MemoryLimiter()
