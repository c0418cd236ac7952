"""Watch the processes of a run from a background thread, so that hung processes are killed and
replaced.

If Keel started the cluster, the thread itself polls the processes. If the run joined a cluster, an
actor on each node polls them.
"""

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from keel.model import ray_timeouts
from keel.trainer.placement.hardware import RANK
from keel.trainer.placement.processes import POLL_S, RAY_PROCESSES, RAYLET, HangDetector, NodeHealth
from keel.trainer.placement.ray_internals import exit_now, own_processes
from keel.trainer.run.restarts import WorkerLost

_ANSWER_S = 5.0  # timeout for polling all nodes once
_SILENT_S = 15.0  # a warning is printed if a node has not answered for this many seconds
_PARTITION_S = 90.0
"""A node that cannot reach the GCS for this many seconds kills the run's processes. After 65 s, Ray
declares the node lost and restarts its actors elsewhere."""
CONNECT_S = 5.0  # interval between attempts to reach the GCS, and the timeout of each attempt
_GCS = "Ray's control service (GCS), on the cluster's first node,"
_GCS_WARN_S, _GCS_HANG_S = 15.0, 40.0
"""Seconds without an answer from the GCS before a warning is printed and before the run ends. After
60 s, Ray would end this process without a message."""
_GCS_ANSWER_S = 1.0  # how long each poll waits for the GCS
_LIST_NODES_S = 5.0  # interval at which the list of cluster nodes is updated
_ACTOR = "node monitor"


class Watchdog:
    """Checks every second that a run's processes are healthy."""

    def __init__(
        self, poll: Callable[[], NodeHealth], say: Callable[[str], Any], *processes: int
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
        self._thread.join(2 * _ANSWER_S)
        while not self._thread.is_alive() and self._files:
            os.close(self._files.pop())

    def _run(self) -> None:
        files = list(self._files)
        while self._stopping not in (ready := select.select(files, [], [], POLL_S)[0]):
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

    def _record(self, health: NodeHealth) -> None:
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
        detector = HangDetector(
            local["raylet"][0],
            processes,
            start=ray_timeouts.session_id(),
            hang_timeout_s=hang_timeout_s,
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
    """Ray actor that runs a `HangDetector` on its node. If the node loses its connection to the
    cluster, the actor kills the run's processes there. Ray would leave them running, and they would
    hold on to their memory."""

    def __init__(self, start: str, hang_timeout_s: float) -> None:
        raylet = os.getppid()
        self._detector = HangDetector(
            raylet, {RAYLET: raylet}, start=start, hang_timeout_s=hang_timeout_s
        )
        if hang_timeout_s:
            threading.Thread(target=self._kill_if_partitioned, daemon=True).start()

    def poll(self) -> NodeHealth:
        return self._detector.poll()

    def _kill_if_partitioned(self) -> None:
        address: str = ray.get_runtime_context().gcs_address
        timer = _PartitionTimer(lambda: can_connect(address))
        while not timer.expired():
            time.sleep(CONNECT_S)
        self._detector.kill_all()
        exit_now(1)


class _PartitionTimer:
    """Measures how long a node has been unable to reach the GCS."""

    def __init__(
        self, connects: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connects, self._elapsed_s = connects, 0.0
        self._clock = ray_timeouts.PollClock(2 * CONNECT_S, clock)

    def expired(self) -> bool:
        """Return True if every attempt to connect within the last `_PARTITION_S` seconds has
        failed."""
        connected, elapsed_s = self._connects(), self._clock.elapsed()
        self._elapsed_s = 0.0 if connected else self._elapsed_s + elapsed_s
        return self._elapsed_s >= _PARTITION_S


def can_connect(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


@dataclass(slots=True)
class _Node:
    host: str
    monitor: Any
    last: NodeHealth
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
        actors = ", ".join(sorted(self.last.actors.keys() - {_ACTOR})) or "no actor of this run"
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
        self._since_query_s = self._gcs_silent_s = 0.0
        self._gcs_warned = False
        self._clock = ray_timeouts.PollClock(_ANSWER_S, clock)
        self._hang_timeout_s = hang_timeout_s
        self._update_nodes(_alive_nodes())

    def poll(self) -> NodeHealth:
        elapsed_s, end = self._clock.elapsed(), time.monotonic() + _ANSWER_S
        for node in self._nodes.values():
            node.request = node.request or node.monitor.poll.remote()
        messages: list[str] = []
        for node in self._nodes.values():
            messages += node.poll(max(0.1, end - time.monotonic()), elapsed_s)
        failure = self._poll_gcs(elapsed_s, messages)
        return NodeHealth(
            actors={k: v for node in self._nodes.values() for k, v in node.last.actors.items()},
            messages=tuple(messages),
            ray_failure=failure,
            dead_nodes=dict(self._dead),
        )

    def _poll_gcs(self, elapsed_s: float, messages: list[str]) -> str:
        self._since_query_s += elapsed_s
        if self._query is None:
            if self._since_query_s < _LIST_NODES_S:
                return ""
            self._since_query_s = self._gcs_silent_s = elapsed_s = 0.0
            self._gcs_warned, self._query = False, Future()
            # May hang if the GCS does.
            threading.Thread(target=_query_alive_nodes, args=(self._query,), daemon=True).start()
        wait([self._query], _GCS_ANSWER_S)
        if not self._query.done():
            self._gcs_silent_s += elapsed_s
            silence = f"{_GCS} has not answered for {self._gcs_silent_s:.0f} s"
            if self._gcs_silent_s >= _GCS_HANG_S:
                return silence
            if self._gcs_silent_s >= _GCS_WARN_S and not self._gcs_warned:
                self._gcs_warned = True
                messages.append(f"{silence}. After {_GCS_HANG_S:g} s the run ends")
            return ""
        query, self._query = self._query, None
        try:
            self._update_nodes(query.result())
        except TimeoutError as error:
            return str(error)
        return ""

    def _update_nodes(self, alive: Mapping[str, str]) -> None:
        for node in self._nodes.keys() - alive.keys():
            self._dead[node] = self._nodes.pop(node).host
        for node in alive.keys() - self._nodes.keys():
            monitor = _create_monitor(node, self._hang_timeout_s)
            self._nodes[node] = _Node(alive[node], monitor, NodeHealth(actors={}))


def _alive_nodes() -> Mapping[str, str]:
    nodes = ray_timeouts.bounded(ray.nodes, ray_timeouts.CALL_S, "list its nodes")
    return {n["NodeID"]: n["NodeManagerHostname"] for n in nodes if n["Alive"]}


def _query_alive_nodes(query: Future[Mapping[str, str]]) -> None:
    try:
        query.set_result(_alive_nodes())
    except Exception as error:  # raised by `result`
        query.set_exception(error)


def _create_monitor(node: str, hang_timeout_s: float) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": strategy, "max_restarts": -1}
    return ray_timeouts.create(
        _NodeMonitor, _ACTOR, options, ray_timeouts.session_id(), hang_timeout_s
    )
