"""Monitors all nodes of a cluster that this process has joined, using one actor per node."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from keel.model import ray_timeouts
from keel.trainer.placement.hang_detector import RAYLET, HangDetector, NodeHealth
from keel.trainer.placement.ray_internals import exit_now

ANSWER_S = 5.0
"""Timeout for polling all nodes once."""
SILENT_S = 15.0
"""A warning is printed if a node has not answered for this many seconds."""
PARTITION_S = 90.0
"""A node that cannot reach the GCS for this many seconds kills the run's processes. After 65 s, Ray
declares the node lost and restarts its actors elsewhere."""
CONNECT_S = 5.0
"""Interval between attempts to reach the GCS, and the timeout of each attempt."""
GCS = "Ray's control service (GCS), on the cluster's first node,"
GCS_WARN_S, GCS_HANG_S = 15.0, 40.0
"""Seconds without an answer from the GCS before a warning, and before the run ends. After 60 s, Ray
would end this process without a message."""
GCS_ANSWER_S = 1.0
"""How long each poll waits for the GCS."""
LIST_NODES_S = 5.0
"""Interval at which the list of cluster nodes is updated."""
_ACTOR = "node monitor"


class NodeMonitor:
    """Ray actor that runs a `HangDetector` on its node.

    If the node loses its connection to the cluster, the actor kills the run's processes on it. Ray
    would leave them running, with all their memory.
    """

    def __init__(self, start: str, hang_timeout_s: float) -> None:
        raylet = os.getppid()
        self._detector = HangDetector(
            raylet, {RAYLET: raylet}, start=start, hang_timeout_s=hang_timeout_s
        )
        if hang_timeout_s:
            address: str = ray.get_runtime_context().gcs_address
            timer = PartitionTimer(lambda: can_connect(address))
            threading.Thread(target=self._kill_if_partitioned, args=(timer,), daemon=True).start()

    def poll(self) -> NodeHealth:
        return self._detector.poll()

    def _kill_if_partitioned(self, timer: PartitionTimer) -> None:
        while not timer.expired():
            time.sleep(CONNECT_S)
        self._detector.kill_all()
        exit_now(1)


class PartitionTimer:
    """Measures how long a node has been unable to reach the GCS."""

    def __init__(
        self, connects: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connects, self._elapsed_s = connects, 0.0
        self._clock = ray_timeouts.PollClock(2 * CONNECT_S, clock)

    def expired(self) -> bool:
        """Try to connect. Returns True if all attempts have failed for `PARTITION_S`."""
        connected, elapsed_s = self._connects(), self._clock.elapsed()
        self._elapsed_s = 0.0 if connected else self._elapsed_s + elapsed_s
        return self._elapsed_s >= PARTITION_S


def can_connect(address: str) -> bool:
    """Return True if `host:port` or `[host]:port` accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


@dataclass(slots=True)
class _Node:
    """The monitor of a node and its latest answer."""

    host: str
    monitor: Any
    last: NodeHealth
    request: Any = None
    """The poll that is still waiting for an answer. There is at most one, so no answer is lost."""
    silent_s: float = 0.0

    def poll(self, timeout_s: float, elapsed_s: float) -> list[str]:
        """Wait up to `timeout_s` for the answer to the current poll. Returns new messages and
        warnings."""
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
        if not before < SILENT_S <= self.silent_s:
            return []
        actors = ", ".join(sorted(self.last.actors.keys() - {_ACTOR})) or "no actor of this run"
        return [
            f"node {self.host} does not answer ({reason.splitlines()[-1]}); on it: {actors}. Ray "
            "gives a node up after about 65 s and restarts its actors elsewhere"
        ]


class ClusterMonitor:
    """Polls the monitors of all nodes and combines their results."""

    def __init__(self, hang_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._nodes: dict[str, _Node] = {}
        self._dead: dict[str, str] = {}
        self._query: Future[Mapping[str, str]] | None = None
        self._since_query_s = self._gcs_silent_s = 0.0
        self._gcs_warned = False
        self._clock = ray_timeouts.PollClock(ANSWER_S, clock)
        self._hang_timeout_s = hang_timeout_s
        self._add_nodes(_alive_nodes())

    def poll(self) -> NodeHealth:
        elapsed_s, end = self._clock.elapsed(), time.monotonic() + ANSWER_S
        for node in self._nodes.values():
            node.request = node.request or node.monitor.poll.remote()
        actors: dict[str, int] = {}
        messages: list[str] = []
        for node in self._nodes.values():
            messages += node.poll(max(0.1, end - time.monotonic()), elapsed_s)
            actors |= node.last.actors
        failure = self._poll_gcs(actors, elapsed_s, messages)
        return NodeHealth(
            actors=actors,
            messages=tuple(messages),
            ray_failure=failure,
            dead_nodes=dict(self._dead),
        )

    def _poll_gcs(self, actors: dict[str, int], elapsed_s: float, messages: list[str]) -> str:
        """Update the list of nodes. Returns the reason why Ray is unusable, or an empty string.

        Dead nodes and their actors are removed, and new nodes get a monitor.
        """
        self._since_query_s += elapsed_s
        if self._query is None and self._since_query_s < LIST_NODES_S:
            return ""
        if self._query is None:
            self._since_query_s = self._gcs_silent_s = elapsed_s = 0.0
            self._gcs_warned, self._query = False, Future()
            target = partial(_resolve, self._query)  # may hang if the GCS does
            threading.Thread(target=target, name="keel-nodes", daemon=True).start()
        wait([self._query], GCS_ANSWER_S)
        if not self._query.done():
            self._gcs_silent_s += elapsed_s
            silence = f"{GCS} has not answered for {self._gcs_silent_s:.0f} s"
            if self._gcs_silent_s >= GCS_HANG_S:
                return silence
            if self._gcs_silent_s >= GCS_WARN_S and not self._gcs_warned:
                self._gcs_warned = True
                messages.append(f"{silence}. After {GCS_HANG_S:g} s the run ends")
            return ""
        query, self._query = self._query, None
        try:
            alive = query.result()
        except TimeoutError as error:
            return str(error)
        for node in self._nodes.keys() - alive.keys():
            lost = self._nodes.pop(node)
            self._dead[node] = lost.host
            for name in lost.last.actors:
                actors.pop(name, None)
        self._add_nodes(alive)
        return ""

    def _add_nodes(self, nodes: Mapping[str, str]) -> None:
        for node, host in nodes.items():
            if node not in self._nodes:
                monitor = _create_monitor(node, self._hang_timeout_s)
                self._nodes[node] = _Node(host, monitor, NodeHealth(actors={}, host=host))


def _alive_nodes() -> Mapping[str, str]:
    nodes = ray_timeouts.bounded(ray.nodes, ray_timeouts.CALL_S, "list its nodes")
    return {n["NodeID"]: n["NodeManagerHostname"] for n in nodes if n["Alive"]}


def _resolve(query: Future[Mapping[str, str]]) -> None:
    try:
        query.set_result(_alive_nodes())
    except Exception as error:  # raised by `result`
        query.set_exception(error)


def _create_monitor(node: str, hang_timeout_s: float) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": strategy, "max_restarts": -1}
    return ray_timeouts.create(NodeMonitor, _ACTOR, options, ray_timeouts.start(), hang_timeout_s)
