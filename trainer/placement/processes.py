"""Reads the state of processes and threads from /proc, and kills processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

EXITED = (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError)
"""The errors that can occur if a process exits while its state is being read."""
_SWITCHES = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadState:
    """The state of a thread, read from /proc/PID/task/TID/status."""

    stopped: bool  # by SIGSTOP, together with its process
    debugged: bool
    switches: str
    """The number of context switches so far. It is empty if the kernel does not count them (such as
    gVisor)."""


def _tasks(pid: int) -> Path:
    return Path(psutil.PROCFS_PATH, str(pid), "task")


def thread_state(pid: int, tid: int) -> ThreadState:
    """Read the state of one thread. Raises one of `EXITED` if it has exited."""
    lines = (_tasks(pid) / str(tid) / "status").read_text().splitlines()
    fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    state = fields.get("State", "")[:1]
    return ThreadState(
        stopped=state == "T",
        debugged=state == "t" or fields.get("TracerPid", "0") != "0",
        switches=" ".join(fields.get(name, "") for name in _SWITCHES).strip(),
    )


def thread_states(pid: int) -> dict[int, ThreadState]:
    """Return the state of every thread in a process, keyed by thread id.

    Raises one of `EXITED` if the process has exited.
    """
    states: dict[int, ThreadState] = {}
    for task in _tasks(pid).iterdir():
        with suppress(*EXITED):
            states[int(task.name)] = thread_state(pid, int(task.name))
    return states


def children(pid: int) -> Iterator[int]:
    """Yield the ids of the child processes. The kernel may omit some if others are exiting."""
    with suppress(*EXITED):
        for task in _tasks(pid).iterdir():
            with suppress(OSError):
                yield from map(int, (task / "children").read_text().split())


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children, their children, and so on."""
    pids = list(children(pid))
    for child in pids:  # grows meanwhile
        pids += children(child)
    return pids


def kill(processes: Sequence[psutil.Process]) -> str:
    """Kill processes and wait for them to exit. Returns a note if one of them does not exit, or an
    empty string."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while remaining := [process.pid for process in processes if not has_exited(process)]:
        if time.monotonic() >= deadline:
            return f", but process {remaining[0]} still runs after {_KILL_TIMEOUT_S:g} s"
        time.sleep(0.02)
    return ""


def has_exited(process: psutil.Process | int) -> bool:
    """Return True if a process has exited. A zombie counts as exited, because it holds no
    memory."""
    try:
        if isinstance(process, int):
            process = psutil.Process(process)
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def available_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many CPU cores this process may use under its CPU affinity and container quota."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no quota file, or "max"
        time_us, period_us = map(int, quota.read_text().split())
        cores = min(cores, max(1, time_us // period_us))
    return cores
