"""What stands still of a run on a machine: looked for in /proc, and ended.

A process that is busy for long is not frozen: the kernel counts how often its threads were given a
processor. One that was stopped (SIGSTOP) says so, and of one that its machine does not run any more
(a hanging driver, a frozen container) no thread gets on. Both are counted in looks, not in seconds:
whoever looks may have been stopped too, together with all the rest, and have gone on with it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from keel.model.ray_calls import NAME

RAYLET = "Ray's node process (raylet)"
RAYS = {"raylet": RAYLET, "gcs_server": "Ray's control service (GCS)"}
"""Ray's processes without which nothing goes on, by Ray's name for them."""
LOOK_S = 1.0
"""Between two looks."""
STOPPED = 5
"""Looks in a row that find a process stopped, after which it is ended."""
STILL = 20
"""Looks in a row in which none of its threads was given a processor. Ray's wake up a hundred times
a second."""
COUNTED = "voluntary_ctxt_switches"
"""Lines of /proc/PID/task/TID/status. Not every kernel has them (gVisor): there nobody is still."""
GONE_S = 10.0
"""Longest wait for a process that was killed to be gone, and its memory with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a look has found."""

    here: Mapping[str, int]
    """Each process of the run by its name, with its number."""
    host: str = ""
    ended: tuple[str, ...] = ()
    """What stood still and was ended, in words."""
    lost: str = ""
    """What of Ray's own is gone or stands still, in words."""


@dataclass(slots=True)
class _Seen:
    """A process, as earlier looks have found it."""

    process: psutil.Process
    name: str = ""
    stopped: int = 0
    still: int = 0
    switches: dict[str, str] = field(default_factory=dict[str, str])
    """How often each thread was given a processor, in the kernel's words."""

    def frozen(self, *, own_threads: bool) -> str:
        """How, in words; "" while it is not. own_threads: some that always wake up."""
        self.stopped = self.stopped + 1 if self.process.status() == psutil.STATUS_STOPPED else 0
        self.still = self.still + 1 if own_threads and not self._moved() else 0
        if self.stopped >= STOPPED:
            return f"has been stopped (SIGSTOP) for {STOPPED * LOOK_S:g} s"
        if self.still >= STILL:
            return f"has not run at all for {STILL * LOOK_S:g} s"
        return ""

    def _moved(self) -> bool:
        """Whether a thread has got on since the last look; the first that has is enough."""
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                counts = (task / "status").read_text().partition(COUNTED)[2]
                if not counts or self.switches.get(task.name) != counts:
                    self.switches[task.name] = counts
                    return True
        return False


class Looker:
    """Looks at the actors that a raylet has started, with all below them, and at Ray's own
    processes."""

    def __init__(self, raylet: int, rays: Mapping[str, int]) -> None:
        """rays: those of Ray's own without which nothing goes on, by what to call them."""
        self._raylet = raylet
        self._rays = {name: psutil.Process(pid) for name, pid in rays.items()}
        self._seen: dict[int, _Seen] = {}
        self._host = socket.gethostname()

    def look(self) -> Sight:
        """Ends what stands still of the run."""
        for name, process in self._rays.items():
            if why := self._lost(process):
                return Sight(here={}, lost=f"{name} (process {process.pid} on {self._host}) {why}")
        here: dict[str, int] = {}
        ended: list[str] = []
        for pid in children(self._raylet):
            with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                actor = self._at(pid)
                if not actor.name or actor.process.status() == psutil.STATUS_ZOMBIE:
                    continue
                here[actor.name] = pid
                tree = [actor, *map(self._at, below(pid))]
                if why := frozen(tree):
                    late = end([part.process for part in tree])
                    ended.append(f"{actor.name} (process {pid} on {self._host}) {why}{late}")
        alive = psutil.pid_exists
        self._seen = {pid: seen for pid, seen in self._seen.items() if alive(pid)}
        return Sight(host=self._host, here=here, ended=tuple(ended))

    def _lost(self, process: psutil.Process) -> str:
        try:
            seen = self._at(process.pid)
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                return seen.frozen(own_threads=True)
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            pass
        return "is gone"

    def _at(self, pid: int) -> _Seen:
        process = psutil.Process(pid)
        if pid not in self._seen or self._seen[pid].process != process:
            self._seen[pid] = _Seen(process)
        seen = self._seen[pid]
        if not seen.name:  # Ray starts a process first, and gives it its environment then
            with suppress(psutil.AccessDenied):
                seen.name = process.environ().get(NAME, "")
        return seen


def frozen(tree: Sequence[_Seen]) -> str:
    """How an actor, the first of `tree`, stands still, or one that it has started and waits for."""
    found = ""
    for seen in tree:
        if why := seen.frozen(own_threads=seen is tree[0]):
            whose = "" if seen is tree[0] else f"waits for its process {seen.process.pid}, which "
            found = found or f"{whose}{why}, and was ended"
    return found


def end(processes: Sequence[psutil.Process]) -> str:
    """Kill them, and wait until they are gone; what to say if they are not."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    until = time.monotonic() + GONE_S
    while left := [process.pid for process in processes if not gone(process)]:
        if time.monotonic() >= until:
            return f", but process {left[0]} is not gone within {GONE_S:g} s"
        time.sleep(0.02)
    return ""


def gone_by(pid: int) -> bool:
    """As `gone`, of a child of this process."""
    try:
        return gone(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def gone(process: psutil.Process) -> bool:
    """One that only waits to be reaped holds no memory any more."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def children(pid: int) -> list[int]:
    """What a process has started and is there still."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def below(pid: int) -> list[int]:
    """As `children`, with theirs."""
    found = children(pid)
    for child in found:  # grows meanwhile
        found += children(child)
    return found
