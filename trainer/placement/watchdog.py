"""Watch the processes of a run, so that hung processes are killed and replaced.

A process hangs if it is stopped (SIGSTOP). Calls of an engine or a rank that make no progress have
their own deadlines. Durations are counted in polls instead of wall time, so that nothing is killed
by mistake after the monitor itself was suspended.

If Keel started the cluster, a background thread of this process polls the others. If the run joined
a cluster, an actor on each node polls them.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from keel.model import ray_timeouts
from keel.rl.futures import on_thread
from keel.rl.supervisor import JOIN_S
from keel.trainer.placement.hardware import RANK
from keel.trainer.placement.ray_internals import exit_now, own_processes
from keel.trainer.run.errors import WorkerLost

_RAYLET = "Ray's node process (raylet)"
RAY_PROCESSES = {"raylet": _RAYLET, "gcs_server": "Ray's control service (GCS)"}
"""Descriptions of the Ray processes that a run depends on, keyed by Ray's names for them."""
_POLL_S = 1.0
_WARN_S = 20.0  # a warning is printed after a process has been stopped for this many seconds
_RAY_HANG_S = 60.0
"""Maximum time that Ray's own processes may be stopped. Ray declares a node lost if its raylet does
not answer for 65 s."""
_KILLED_S = 10.0  # polls wait for killed processes, and must answer within _SILENT_S
_ANSWER_S = 5.0  # timeout for polling all nodes once
_SILENT_S = 15.0  # a warning is printed if a node has not answered for this many seconds
_CONNECT_S = 5.0  # interval between attempts to reach the GCS, and the timeout of each attempt
_GCS_HANG_S = 40.0
"""Seconds without an answer from the GCS before the run ends. After 60 s, Ray would end this
process without a message."""
_LIST_NODES_S = 5.0  # interval at which the list of cluster nodes is updated
_ACTOR = "node monitor"


def kill(processes: Sequence[psutil.Process]) -> str:
    """Kill processes and wait for them to exit. Returns a note if any of them doesn't exit."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + _KILLED_S
    while remaining := [process.pid for process in processes if not has_exited(process)]:
        if time.monotonic() >= deadline:
            return f", but process {remaining[0]} still runs after {_KILLED_S:g} s"
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


def available_cores() -> int:
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no quota file, or "max"
        time_us, period_us = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, max(1, time_us // period_us))
    return cores


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeHealth:
    """The result of polling a node once."""

    actors: Collection[str] = ()  # names of the run's actors
    messages: tuple[str, ...] = ()  # new warnings, and messages about processes that were killed
    ray_failure: str = ""
    """Why Ray cannot be used, for example because one of its processes has exited or hangs. Empty
    if Ray works."""
    dead_nodes: Mapping[str, str] = field(default_factory=dict[str, str])
    """Hosts of the nodes that Ray has declared lost, keyed by node id."""


class _HangDetector:
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
        """`ray_processes` maps a description of each Ray process to its process id. `start`
        identifies the current session (`keel.model.ray_timeouts.session_id`); actors from other
        sessions are ignored. If `hang_timeout_s` is 0, no process is killed."""
        self._raylet, self._start, self._timeout_s = psutil.Process(raylet), start, hang_timeout_s
        self._ray = {name: psutil.Process(pid) for name, pid in ray_processes.items()}
        self._actors: dict[str, psutil.Process] = {}
        self._names: dict[psutil.Process, str] = {}
        self._stopped_s: dict[psutil.Process, float] = {}
        """How long each stopped process has been stopped."""
        self._clock, self._host = ray_timeouts.PollClock(_POLL_S, clock), socket.gethostname()
        self._elapsed_s, self._messages = 0.0, list[str]()
        """Seconds since the last poll, and the messages of the current one."""

    def poll(self) -> _NodeHealth:
        self._elapsed_s, self._messages, failure = self._clock.elapsed(), [], ""
        for name, process in self._ray.items():
            subject = f"{name} (process {process.pid} on {self._host})"
            hang = f"{subject} is gone"
            if not has_exited(process):
                hang = self._check(process, subject, _RAY_HANG_S, "Ray is abandoned")
            failure = failure or hang
        with suppress(psutil.NoSuchProcess):
            self._check_actors()
        if failure and has_exited(self._raylet):
            self.kill_all()  # a stopped actor would outlive its raylet
        return _NodeHealth(
            actors=tuple(self._actors), messages=tuple(self._messages), ray_failure=failure
        )

    def kill_all(self) -> None:
        actors = [actor for actor in self._actors.values() if actor.pid != os.getpid()]
        kill([process for actor in actors for process in _tree(actor)])

    def _check_actors(self) -> None:
        processes = self._raylet.children(recursive=True)
        # A known name is kept, because a process's environment may become unreadable.
        names = {process: self._names.get(process) or self._name(process) for process in processes}
        self._names = names
        own = [process for process, name in names.items() if name and not has_exited(process)]
        actors = dict[str, psutil.Process]()
        for process in own:
            with suppress(psutil.NoSuchProcess):
                if process.ppid() == self._raylet.pid:
                    actors[names[process]] = process
        self._actors = actors
        # Processes without a name are those of an environment, or of a run inside this run.
        for process in own:
            if (actor := actors.get(names[process])) is None:
                continue
            subject = f"{names[process]} (process {actor.pid} on {self._host})"
            if process != actor:
                subject += f" waits for its process {process.pid}, which"
            if hang := self._check(process, subject, math.inf, "it is killed"):
                self._messages.append(f"{hang}, and was killed{kill(_tree(actor))}")
                self._stopped_s.pop(process)  # retry later if it survived

    def _check(
        self, process: psutil.Process, subject: str, limit_s: float, consequence: str
    ) -> str:
        """Describe a hang that has lasted for at least `limit_s` or `hang_timeout_s`, or return an
        empty string. A shorter hang only adds one warning to the messages."""
        timeout_s = min(self._timeout_s, limit_s)
        before = self._stopped_s.pop(process, 0.0)
        try:
            if process.status() != psutil.STATUS_STOPPED:  # not even one in a debugger
                return ""
        except psutil.NoSuchProcess:
            return ""
        now = self._stopped_s[process] = before + self._elapsed_s
        hang = f"{subject} has been stopped (SIGSTOP) for {now:.0f} s"
        if timeout_s and now >= timeout_s:
            return hang
        if before < _WARN_S <= now:
            future = f"After {timeout_s:g} s {consequence}" if timeout_s else "It is left alone"
            self._messages.append(f"{hang}. {future} (run.hang_timeout_s)")
        return ""

    def _name(self, process: psutil.Process) -> str:
        """Return the name of the actor that a process belongs to, from the environment variable
        that Ray sets shortly after starting the actor."""
        with suppress(psutil.Error, OSError):
            mark = process.environ().get(ray_timeouts.NAME, "")
            return ray_timeouts.process_name(mark, self._start)
        return ""


def _tree(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return [process]


class Watchdog:
    """Checks every second that a run's processes are healthy."""

    def __init__(
        self, poll: Callable[[], _NodeHealth], say: Callable[[str], Any], *processes: int
    ) -> None:
        """Start the watchdog's thread. It polls right away if one of the local `processes`
        exits."""
        self.say = say  # called from the watchdog's thread with each warning
        self.nodes: Set[str] = frozenset()
        """Ids of the nodes with GPUs reserved for the run, which cannot continue without them."""
        self._poll, self._failure, self._failed = poll, "", False
        self._ranks: set[str] = set()
        self._stopping = os.eventfd(0)
        self._files = [self._stopping, *map(os.pidfd_open, processes)]
        self._thread = threading.Thread(target=self._run, name="keel-watchdog", daemon=True)
        self._thread.start()

    def should_stop_waiting(self) -> bool:
        self.check()
        return False

    def check(self) -> None:
        """Raise `RayLost` if Ray is unusable, or `WorkerLost` if a rank or a required node has been
        lost."""
        if reason := ray_timeouts.lost_reason():
            raise ray_timeouts.RayLost(reason)
        if self._failure:
            raise WorkerLost(self._failure)

    def stop(self) -> None:
        os.eventfd_write(self._stopping, 1)
        self._thread.join(JOIN_S)
        while not self._thread.is_alive() and self._files:
            os.close(self._files.pop())

    def _run(self) -> None:
        files = list(self._files)
        while self._stopping not in (ready := select.select(files, [], [], _POLL_S)[0]):
            files = [process for process in files if process not in ready]  # they have exited
            try:
                health = self._poll()
                self._record(health)
                if health.ray_failure:
                    return
            except ray_timeouts.RayLost:  # found and reported by another thread
                return
            except Exception as error:  # the next poll may succeed
                if not self._failed:
                    self._failed = True
                    with suppress(Exception):  # `say` may be what failed
                        self.say(f"looking for hung processes failed and is retried: {error!r}")

    def _record(self, health: _NodeHealth) -> None:
        if health.ray_failure:
            ray_timeouts.mark_lost(f"{health.ray_failure}. The run cannot continue without it")
        ranks = {name for name in health.actors if name.startswith(RANK)}
        failures = [f"{rank} is gone" for rank in sorted(self._ranks - ranks)]
        failures += [
            f"node {host} is gone, and the run's GPUs on it"
            for node, host in health.dead_nodes.items()
            if node in self.nodes
        ]
        self._failure = self._failure or next(iter(failures), "")
        self._ranks |= ranks
        for message in health.messages:
            self.say(message)


@contextmanager
def start_watchdog(
    say: Callable[[str], Any], hang_timeout_s: float, nodes: Set[str] = frozenset()
) -> Iterator[Watchdog]:
    if local := own_processes():
        processes = {name: local[kind][0] for kind, name in RAY_PROCESSES.items() if kind in local}
        start = ray_timeouts.session_id()
        detector = _HangDetector(
            local["raylet"][0], processes, start=start, hang_timeout_s=hang_timeout_s
        )
        watchdog = Watchdog(detector.poll, say, *processes.values())
    else:
        watchdog = Watchdog(_ClusterMonitor(hang_timeout_s).poll, say)
    watchdog.nodes = nodes
    try:
        yield watchdog
    finally:
        watchdog.stop()


class _NodeMonitor:
    """Ray actor that runs a `_HangDetector` on its node. If the node loses its connection to the
    cluster, the actor kills the run's processes there. Ray would leave them running, and they would
    hold on to their memory."""

    def __init__(self, start: str, hang_timeout_s: float) -> None:
        raylet = os.getppid()
        self._detector = _HangDetector(
            raylet, {_RAYLET: raylet}, start=start, hang_timeout_s=hang_timeout_s
        )
        if hang_timeout_s:
            threading.Thread(target=self._kill_if_partitioned, daemon=True).start()

    def poll(self) -> _NodeHealth:
        return self._detector.poll()

    def _kill_if_partitioned(self) -> None:
        address: str = ray.get_runtime_context().gcs_address
        _wait_for_partition(lambda: can_connect(address))
        self._detector.kill_all()
        exit_now(1)


def _wait_for_partition(
    connects: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Wait until every attempt to connect within `NODE_LOST_S` seconds has failed."""
    silent_s, polls = 0.0, ray_timeouts.PollClock(2 * _CONNECT_S, clock)
    while silent_s < ray_timeouts.NODE_LOST_S:
        pause(_CONNECT_S)
        connected, elapsed_s = connects(), polls.elapsed()
        silent_s = 0.0 if connected else silent_s + elapsed_s


def can_connect(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


@dataclass(slots=True)
class _Node:
    host: str
    monitor: Any
    last: _NodeHealth = field(default_factory=_NodeHealth)
    request: Any = None
    """The poll that has not been answered yet. There is never more than one, so no answer is
    lost."""
    silent_s: float = 0.0

    def poll(self, timeout_s: float, elapsed_s: float) -> list[str]:
        failure, reason = self.last.ray_failure, "no answer"
        try:
            self.last = ray_timeouts.get(self.request, seconds=timeout_s)
        except TimeoutError:
            pass
        except RayError as error:  # Ray restarts the monitor
            self.request = None
            reason = ray_timeouts.death_reason(error).strip() or type(error).__name__
        else:
            self.request, self.silent_s, now = None, 0.0, self.last.ray_failure
            # Ray gives the node up later.
            return [*self.last.messages, *[now] * (bool(now) and not failure)]
        before, self.silent_s = self.silent_s, self.silent_s + elapsed_s
        if not before < _SILENT_S <= self.silent_s:
            return []
        actors = ", ".join(sorted({*self.last.actors} - {_ACTOR})) or "no actor of this run"
        return [
            f"node {self.host} does not answer ({reason.splitlines()[-1]}); on it: {actors}. Ray "
            "gives a node up after about 65 s and restarts its actors elsewhere"
        ]


class _ClusterMonitor:
    """Polls the monitors on all nodes and combines their results."""

    def __init__(self, hang_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._nodes: dict[str, _Node] = {}
        self._dead: dict[str, str] = {}
        self._query: Future[Mapping[str, str]] | None = None
        self._since_list_s = 0.0
        self._clock = ray_timeouts.PollClock(_ANSWER_S, clock)
        self._hang_timeout_s = hang_timeout_s
        self._update_nodes(_alive_nodes())

    def poll(self) -> _NodeHealth:
        elapsed_s, end = self._clock.elapsed(), time.monotonic() + _ANSWER_S
        for node in self._nodes.values():
            node.request = node.request or node.monitor.poll.remote()
        messages = list[str]()
        for node in self._nodes.values():
            messages += node.poll(max(0.1, end - time.monotonic()), elapsed_s)
        failure = self._poll_gcs(elapsed_s)
        return _NodeHealth(
            actors=[name for node in self._nodes.values() for name in node.last.actors],
            messages=tuple(messages),
            ray_failure=failure,
            dead_nodes=dict(self._dead),
        )

    def _poll_gcs(self, elapsed_s: float) -> str:
        """Update the list of nodes without waiting for it. Returns why the GCS can't be used, or an
        empty string."""
        self._since_list_s += elapsed_s
        if self._query is None and self._since_list_s >= _LIST_NODES_S:
            self._since_list_s = 0.0
            self._query = on_thread(_alive_nodes, "keel-list-nodes")
        if self._query is not None and self._query.done():
            query, self._query = self._query, None
            try:
                self._update_nodes(query.result())
            except ray_timeouts.Unanswered as error:
                return str(error)
        return ""

    def _update_nodes(self, alive: Mapping[str, str]) -> None:
        for node in self._nodes.keys() - alive.keys():
            self._dead[node] = self._nodes.pop(node).host
        for node in alive.keys() - self._nodes.keys():
            self._nodes[node] = _Node(alive[node], _create_monitor(node, self._hang_timeout_s))


def _alive_nodes() -> Mapping[str, str]:
    nodes = ray_timeouts.alive_nodes(_GCS_HANG_S)
    return {node["NodeID"]: node["NodeManagerHostname"] for node in nodes}


def _create_monitor(node: str, hang_timeout_s: float) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": strategy, "max_restarts": -1}
    return ray_timeouts.create(
        _NodeMonitor, _ACTOR, options, ray_timeouts.session_id(), hang_timeout_s
    )
