"""Read the state of processes from /proc, and detect and kill processes of a run that hang.

A process hangs if it is stopped (SIGSTOP) or if none of its threads gets to run. A process in a
long computation is not hanging, and processes in a debugger are left alone. Durations are counted
in polls instead of wall time, so that nothing is killed by mistake after the monitor itself was
suspended.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from keel.model.ray_timeouts import NAME, PollClock, process_name

_EXITED = (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError)
"""Errors that can occur if a process exits while its state is being read."""
_SWITCHES = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
_KILL_TIMEOUT_S = 10.0
RAYLET = "Ray's node process (raylet)"
RAY_PROCESSES = {"raylet": RAYLET, "gcs_server": "Ray's control service (GCS)"}
"""Descriptions of the Ray processes that a run depends on, keyed by Ray's names for them."""
POLL_S = 1.0
WARN_S = 20.0  # a warning is printed after this many seconds without progress
_IDLE_S = 60.0
"""Minimum idle time before a process that is not stopped is killed. On a busy machine, a healthy
process can go without CPU time for a while."""
_RAY_HANG_S = 60.0
"""Maximum time that Ray's own processes may hang. Ray declares a node lost if its raylet does not
answer for 65 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ThreadState:
    """A thread's state, read from /proc/PID/task/TID/status."""

    stopped: bool  # by SIGSTOP, together with its process
    debugged: bool
    switches: str
    """The number of context switches so far, or an empty string if the kernel does not count them
    (as in gVisor)."""


def _tasks(pid: int) -> Path:
    return Path(psutil.PROCFS_PATH, str(pid), "task")


def _thread_state(pid: int, tid: int) -> _ThreadState:
    lines = (_tasks(pid) / str(tid) / "status").read_text().splitlines()
    fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    state = fields.get("State", "")[:1]
    return _ThreadState(
        stopped=state == "T",
        debugged=state == "t" or fields.get("TracerPid", "0") != "0",
        switches=" ".join(fields.get(name, "") for name in _SWITCHES).strip(),
    )


def _children(pid: int) -> Iterator[int]:
    """Yield the ids of a process's children. The kernel may omit some while others are exiting."""
    with suppress(*_EXITED):
        for task in _tasks(pid).iterdir():
            with suppress(OSError):
                yield from map(int, (task / "children").read_text().split())


def descendants(pid: int) -> list[int]:
    pids = list(_children(pid))
    for child in pids:  # grows meanwhile
        pids += _children(child)
    return pids


def kill(processes: Sequence[psutil.Process]) -> str:
    """Kill processes and wait for them to exit. Returns a note if any of them doesn't exit."""
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
    """Return True for exited processes and for zombies, which no longer hold any memory."""
    try:
        if isinstance(process, int):
            process = psutil.Process(process)
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def available_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no quota file, or "max"
        time_us, period_us = map(int, quota.read_text().split())
        cores = min(cores, max(1, time_us // period_us))
    return cores


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """The result of polling a node once."""

    actors: Mapping[str, int]  # the process id of each of the run's actors, keyed by actor name
    messages: tuple[str, ...] = ()  # new warnings, and messages about processes that were killed
    ray_failure: str = ""
    """Why Ray cannot be used, for example because one of its processes has exited or hangs. Empty
    if Ray works."""
    dead_nodes: Mapping[str, str] = field(default_factory=dict[str, str])
    """Hosts of the nodes that Ray has declared lost, keyed by node id."""


@dataclass(slots=True)
class _ProcessHealth:
    process: psutil.Process
    actor: str = ""  # name of the actor that runs in the process, if any
    stopped_s: float = 0.0
    idle_s: float = 0.0
    warned: bool = False
    descendants: dict[int, _ProcessHealth] = field(default_factory=dict[int, "_ProcessHealth"])
    _threads: dict[int, _ThreadState] = field(default_factory=dict[int, _ThreadState])
    _active: int = 0
    """Id of a thread that was running during the last full scan. It is checked first."""

    def poll(self, elapsed_s: float, *, wakes: bool = True) -> None:
        """Check whether the process has run since the last poll, and update `stopped_s` and
        `idle_s`.

        Set `wakes` if healthy processes of this kind wake up regularly. If such a process doesn't
        run at all, it is considered hung. Raises one of the exceptions in `_EXITED` if the process
        has exited.
        """
        main = _thread_state(self.process.pid, self.process.pid)
        self.stopped_s = self.stopped_s + elapsed_s if main.stopped and not main.debugged else 0.0
        active = not wakes or main.debugged or not main.switches or self._has_run()
        self.idle_s = 0.0 if active else self.idle_s + elapsed_s

    def _has_run(self) -> bool:
        pid = self.process.pid
        if before := self._threads.get(self._active):
            with suppress(*_EXITED):  # one file instead of hundreds
                now = self._threads[self._active] = _thread_state(pid, self._active)
                if now != before:
                    return True
        known, self._threads = self._threads, {}
        for task in _tasks(pid).iterdir():
            with suppress(*_EXITED):
                self._threads[int(task.name)] = _thread_state(pid, int(task.name))
        ran = [n for n, now in self._threads.items() if now.debugged or now != known.get(n)]
        self._active = ran[0] if ran else self._active
        return bool(ran)

    def check(self, subject: str, timeout_s: float, consequence: str, messages: list[str]) -> str:
        """Describe a hang that has lasted for at least `timeout_s` (0 means no limit), or return an
        empty string. A shorter hang only adds one warning to `messages`."""
        hang, duration_s = "has been stopped (SIGSTOP)", self.stopped_s
        if not self.stopped_s:
            hang, duration_s = "has not run at all", self.idle_s
            timeout_s = timeout_s and max(timeout_s, _IDLE_S)
        description = f"{subject} {hang} for {duration_s:.0f} s"
        if timeout_s and duration_s >= timeout_s:
            return description
        if duration_s >= WARN_S and not self.warned:
            future = f"After {timeout_s:g} s {consequence}" if timeout_s else "It is left alone"
            messages.append(f"{description}. {future} (run.hang_timeout_s)")
        self.warned = duration_s >= WARN_S
        return ""


class HangDetector:
    """Monitors the actors started by a raylet, their descendants, and Ray's own processes."""

    def __init__(
        self,
        raylet: int,
        ray_processes: Mapping[str, int],
        *,
        start: str,
        hang_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Monitor Ray's own processes and the run's actors started by `raylet`.

        `ray_processes` maps a description of each Ray process to its process id. `start` identifies
        the current session (`keel.model.ray_timeouts.session_id`); actors from other sessions are
        ignored. If `hang_timeout_s` is 0, no process is killed.
        """
        self._raylet, self._start, self._timeout_s = raylet, start, hang_timeout_s
        self._ray = {
            name: _ProcessHealth(psutil.Process(pid)) for name, pid in ray_processes.items()
        }
        self._children: dict[int, _ProcessHealth] = {}
        self._clock, self._host = PollClock(POLL_S, clock), socket.gethostname()

    def poll(self) -> NodeHealth:
        elapsed_s, messages = self._clock.elapsed(), list[str]()
        failures = [self._poll_ray(*item, elapsed_s, messages) for item in self._ray.items()]
        failure = next(filter(None, failures), "")
        actors = self._refresh_actors()
        for actor in actors:
            self._poll_actor(actor, elapsed_s, messages)
        if failure and has_exited(self._raylet):
            self.kill_all()  # a frozen actor would outlive its raylet
        return NodeHealth(
            actors={actor.actor: actor.process.pid for actor in actors},
            messages=tuple(messages),
            ray_failure=failure,
        )

    def kill_all(self) -> None:
        processes: list[psutil.Process] = []
        for actor in self._refresh_actors():
            if actor.process.pid != os.getpid():
                for pid in (actor.process.pid, *descendants(actor.process.pid)):
                    with suppress(psutil.NoSuchProcess):
                        processes.append(psutil.Process(pid))
        kill(processes)

    def _refresh_actors(self) -> list[_ProcessHealth]:
        self._children = _update_processes(self._children, _children(self._raylet))
        for health in self._children.values():
            health.actor = health.actor or process_name(
                _read_process_name(health.process), self._start
            )
        return [health for health in self._children.values() if health.actor]

    def _poll_ray(
        self, name: str, health: _ProcessHealth, elapsed_s: float, messages: list[str]
    ) -> str:
        subject = f"{name} (process {health.process.pid} on {self._host})"
        with suppress(*_EXITED):
            if not has_exited(health.process):
                health.poll(elapsed_s)
                timeout_s = min(self._timeout_s, _RAY_HANG_S)
                return health.check(subject, timeout_s, "Ray is abandoned", messages)
        return f"{subject} is gone"

    def _poll_actor(self, actor: _ProcessHealth, elapsed_s: float, messages: list[str]) -> None:
        actor.descendants = _update_processes(actor.descendants, descendants(actor.process.pid))
        subject = f"{actor.actor} (process {actor.process.pid} on {self._host})"
        tree, hang = [actor, *actor.descendants.values()], ""
        for health in tree:
            part = "" if health is actor else f" waits for its process {health.process.pid}, which"
            with suppress(*_EXITED):
                health.poll(elapsed_s, wakes=health is actor)
                if health.stopped_s and not process_name(
                    _read_process_name(health.process), self._start
                ):
                    health.stopped_s = 0.0  # of an environment, or of a run inside this run
                found = health.check(subject + part, self._timeout_s, "it is killed", messages)
                hang = hang or found
        if hang:
            messages.append(f"{hang}, and was killed{kill([health.process for health in tree])}")
            for health in tree:  # retry later if a process survived
                health.stopped_s = health.idle_s = 0.0


def _update_processes(
    known: Mapping[int, _ProcessHealth], pids: Iterable[int]
) -> dict[int, _ProcessHealth]:
    """Merge `known` and `pids`, dropping processes that have exited. `known` is included because
    the kernel may have left some processes out of `pids`."""
    processes = dict(known)
    for pid in pids:
        if pid not in processes:
            with suppress(psutil.NoSuchProcess):
                processes[pid] = _ProcessHealth(psutil.Process(pid))
    return {pid: health for pid, health in processes.items() if not has_exited(health.process)}


def _read_process_name(process: psutil.Process) -> str:
    """Read the environment variable that names a process's actor and owner. Ray sets it shortly
    after starting the process."""
    with suppress(psutil.Error, OSError):
        return process.environ().get(NAME, "")
    return ""
