"""The watchdog, and the monitors of a cluster's nodes."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from keel.model import ray_timeouts
from keel.trainer.placement import watchdog
from keel.trainer.placement.hang_detector import POLL_S, NodeHealth
from keel.trainer.placement.watchdog import (
    ANSWER_S,
    CONNECT_S,
    PARTITION_S,
    ClusterMonitor,
    PartitionTimer,
    Watchdog,
)
from keel.trainer.run.restarts import WorkerLost
from tests.waiting import PATIENCE_S, wait_for

EMPTY = NodeHealth(actors={})
KILLED = NodeHealth(actors={}, messages=("engine 0 was killed",))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(watchdog, "POLL_S", 0.001)
    yield
    ray_timeouts.joined()


class Dog(Watchdog):
    """A watchdog with a script of poll results. The last result is repeated forever."""

    def __init__(self, *script: NodeHealth | Exception) -> None:
        self.script, self.messages, self.done = list(script), list[str](), threading.Event()
        super().__init__(self.scripted, self.messages.append)

    def scripted(self) -> NodeHealth:
        health = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(health, Exception):
            raise health
        return health

    def fails(self, error: type[Exception], named: str) -> None:
        try:
            wait_for(lambda: self._failure or ray_timeouts.lost_reason())
            with pytest.raises(error, match=named):
                self.should_stop_waiting()
        finally:
            self.stop()


def test_failed_poll_is_reported_once_and_retried() -> None:
    error = OSError("too many open files")
    dog = Dog(error, EMPTY, error, KILLED, EMPTY)
    wait_for(lambda: len(dog.script) == 1)
    assert dog.should_stop_waiting() is False
    dog.stop()
    failure, killed = dog.messages
    assert "too many open files" in failure and killed == "engine 0 was killed"


def test_missing_rank_or_ray_failure_is_a_loss() -> None:
    ranks = NodeHealth(actors={"trainer rank 0": 7, "trainer rank 1": 8, "rollout engine 0": 9})
    Dog(ranks, NodeHealth(actors={"trainer rank 0": 7})).fails(WorkerLost, "trainer rank 1")
    dead = NodeHealth(actors={}, ray_failure="the raylet is gone")
    Dog(dead).fails(ray_timeouts.RayLost, "the raylet is gone")


def test_missing_node_with_reserved_gpus_is_a_loss() -> None:
    other, needed = (NodeHealth(actors={}, dead_nodes={name: f"host-{name}"}) for name in "ba")
    dog = Dog(other)
    dog.nodes = {"a"}
    dog.check()
    dog.script = [other, needed]
    dog.fails(WorkerLost, "host-a")


@pytest.mark.e2e
def test_exit_of_a_process_triggers_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "POLL_S", PATIENCE_S)
    process, polled = subprocess.Popen(["sleep", "600"]), threading.Event()

    def poll() -> NodeHealth:
        polled.set()
        return NodeHealth(actors={}, ray_failure="gone")

    dog = Watchdog(poll, print, process.pid)
    process.kill()
    assert polled.wait(PATIENCE_S / 2)
    dog.stop()
    process.wait()


POLLS = 10


class FakeNode:
    """A handle of a node monitor that returns scripted answers."""

    def __init__(self, rank: int) -> None:
        self.poll, self.requests = self, 0
        actors = {f"trainer rank {rank}": rank + 1, "node monitor": 9}
        self.health = NodeHealth(actors=actors)
        self.error: Exception | None = None

    def remote(self) -> FakeNode:
        self.requests += 1
        return self


class Cluster:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nodes = {name: FakeNode(rank) for rank, name in enumerate("abc")}
        self.alive, self.now = {"a": "host-a", "b": "host-b"}, 0.0
        self.gcs = threading.Event()
        self.gcs.set()

        def answer(node: FakeNode, *, seconds: float) -> NodeHealth:
            if node.error:
                raise node.error
            return node.health

        def alive_nodes(*_: object) -> dict[str, str]:
            self.gcs.wait(PATIENCE_S)
            return dict(self.alive)

        patch.setattr(watchdog, "_alive_nodes", alive_nodes)
        patch.setattr(watchdog, "_create_monitor", lambda node, _: self.nodes[node])
        patch.setattr(ray_timeouts, "get", answer)
        self.monitor = ClusterMonitor(100.0, lambda: self.now)

    def poll(self, seconds: float = ANSWER_S) -> NodeHealth:
        self.now += seconds
        return self.monitor.poll()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def ranks(health: NodeHealth) -> list[str]:
    return sorted(name for name in health.actors if name != "node monitor")


@pytest.mark.parametrize("error", [GetTimeoutError(), ActorUnavailableError("no route", None)])
def test_silent_node_is_reported_and_dead_one_replaced(cluster: Cluster, error: Exception) -> None:
    assert ranks(cluster.poll()) == ["trainer rank 0", "trainer rank 1"]
    cluster.nodes["b"].error = error
    assert cluster.poll(3600.0).messages == ()  # a suspended monitor does not count
    polls = [cluster.poll(ANSWER_S + POLL_S).messages for _ in range(POLLS)]
    (message,) = [line for messages in polls for line in messages]
    assert any(polls[:4]) and "host-b" in message and "trainer rank 1" in message
    assert "trainer rank 1" in cluster.poll().actors  # until Ray gives the node up
    cluster.alive = {"a": "host-a", "c": "host-c"}
    healths = [cluster.poll() for _ in range(POLLS)]
    assert ranks(healths[-1]) == ["trainer rank 0", "trainer rank 2"]
    assert not any(health.ray_failure for health in healths)
    assert healths[-1].dead_nodes == {"b": "host-b"}


def test_silent_gcs_is_reported_then_fatal(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for answers in (True, False):  # it may answer again, and hang again
        monkeypatch.setattr(watchdog, "GCS_ANSWER_S", 0.01)
        cluster.gcs.clear()
        healths = [cluster.poll(3600.0), *(cluster.poll() for _ in range(7))]
        (message,) = [line for health in healths for line in health.messages]
        assert "GCS" in message and healths[3].messages == (message,)
        assert not any(health.ray_failure for health in healths)
        if answers:
            cluster.gcs.set()
            monkeypatch.setattr(watchdog, "GCS_ANSWER_S", PATIENCE_S)
            assert cluster.poll().messages == ()
    assert cluster.poll().ray_failure
    cluster.gcs.set()


def test_partition_needs_failures_in_a_row() -> None:
    now, connects = 0.0, False
    timer = PartitionTimer(lambda: connects, lambda: now)

    def attempts(seconds: float) -> bool:
        nonlocal now
        expired = False
        for _ in range(int(seconds / CONNECT_S)):
            now += CONNECT_S
            expired = timer.expired()
        return expired

    assert not attempts(PARTITION_S - CONNECT_S)
    connects = True
    assert not attempts(CONNECT_S)
    connects = False
    assert not attempts(PARTITION_S - CONNECT_S)
    now += 3600.0  # a machine that slept has failed once
    assert not PartitionTimer(lambda: False, lambda: now).expired()
    assert attempts(CONNECT_S)
