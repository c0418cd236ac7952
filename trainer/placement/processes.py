"""What the kernel says of processes, in /proc, and how they are ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

COUNTED = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
"""Lines of /proc/PID/task/TID/status: how often a thread was given a processor. Not every kernel
has them (gVisor)."""
GONE = (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError)
"""What a look at a process raises that ends meanwhile."""
GONE_S = 10.0
"""Longest wait for a process that was killed to be gone, and its memory with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    stopped: bool
    """By SIGSTOP, with all the others of its process."""
    debugged: bool
    """A debugger is attached."""
    switches: str
    """How often it was given a processor, in the kernel's words; "" where that is not counted."""


def thread(pid: int, number: int) -> Thread:
    """Raises one of `GONE`."""
    lines = (_of(pid) / "task" / str(number) / "status").read_text().splitlines()
    said = {name: words.strip() for name, _, words in (line.partition(":") for line in lines)}
    state = said.get("State", "")[:1]
    return Thread(
        stopped=state == "T",
        debugged=state == "t" or said.get("TracerPid", "0") != "0",
        switches=" ".join(said.get(name, "") for name in COUNTED).strip(),
    )


def threads(pid: int) -> dict[int, Thread]:
    """By number; the first one's is the process's. Raises one of `GONE`."""
    found: dict[int, Thread] = {}
    for task in (_of(pid) / "task").iterdir():
        with suppress(*GONE):
            found[int(task.name)] = thread(pid, int(task.name))
    return found


def available_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """CPU cores that the scheduler and the container's quota grant this process."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no quota file, or "max"
        time_us, period_us = map(int, quota.read_text().split())
        cores = min(cores, max(1, time_us // period_us))
    return cores


def children(pid: int) -> Iterator[int]:
    """What a process has started and is there still. While some of them end, the kernel may leave
    out others that live."""
    with suppress(*GONE):
        for task in (_of(pid) / "task").iterdir():
            with suppress(OSError):
                yield from map(int, (task / "children").read_text().split())


def below(pid: int) -> list[int]:
    """As `children`, with theirs."""
    found = list(children(pid))
    for child in found:  # grows meanwhile
        found += children(child)
    return found


def end(processes: Sequence[psutil.Process]) -> str:
    """Kill them, and wait until they are gone; what to say if they are not."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    until = time.monotonic() + GONE_S
    while left := [process.pid for process in processes if not has_exited(process)]:
        if time.monotonic() >= until:
            return f", but process {left[0]} is not gone within {GONE_S:g} s"
        time.sleep(0.02)
    return ""


def gone_by(pid: int) -> bool:
    """As `gone`, of a child of this process."""
    try:
        return has_exited(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def has_exited(process: psutil.Process) -> bool:
    """One that only waits to be reaped holds no memory any more."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _of(pid: int) -> Path:
    return Path(psutil.PROCFS_PATH, str(pid))
