"""The watchdog and the monitors of a cluster's nodes."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from keel.model import ray_timeouts
from keel.trainer.placement import node_monitor, watchdog
from keel.trainer.placement.hang_detector import POLL_S, RAYLET, NodeHealth
from keel.trainer.placement.node_monitor import (
    ANSWER_S,
    CONNECT_S,
    GCS_HANG_S,
    PARTITION_S,
    SILENT_S,
    ClusterMonitor,
    PartitionTimer,
    can_connect,
)
from keel.trainer.placement.watchdog import Watchdog, start_watchdog
from keel.trainer.run.restarts import WorkerLost
from tests.waiting import PATIENCE_S, wait_for

EMPTY = NodeHealth(actors={})
RANKS = NodeHealth(actors={"trainer rank 0": 7, "trainer rank 1": 8, "rollout engine 0": 9})
KILLED = NodeHealth(actors={}, messages=("engine 0 was killed",))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(watchdog, "POLL_S", 0.001)
    yield
    ray_timeouts.joined()


def watching(*healths: NodeHealth, say: Any = None) -> tuple[Watchdog, list[str]]:
    """A watchdog with these polls; the last one repeats forever."""
    remaining, messages, done = list(healths), list[str](), threading.Event()

    def poll() -> NodeHealth:
        if len(remaining) == 1:
            done.set()
        return remaining.pop(0) if len(remaining) > 1 else remaining[0]

    dog = Watchdog(poll, say or messages.append)
    assert done.wait(PATIENCE_S)
    return dog, messages


def test_messages_are_passed_on_once() -> None:
    dog, messages = watching(KILLED, EMPTY)
    assert dog.should_stop_waiting() is False
    dog.stop()
    assert messages == ["engine 0 was killed"]


def test_missing_rank_is_a_loss() -> None:
    dog, _ = watching(RANKS, NodeHealth(actors={"trainer rank 0": 7}))
    wait_for(lambda: dog._failure)
    with pytest.raises(WorkerLost, match="trainer rank 1"):
        dog.should_stop_waiting()
    dog.stop()


def test_missing_node_with_reserved_gpus_is_a_loss() -> None:
    healths = [NodeHealth(actors={}, dead_nodes={name: f"host-{name}"}) for name in "ba"]
    polled: list[NodeHealth] = []
    dog = Watchdog(lambda: (polled.append(healths[0]), healths[0])[1], print)
    dog.nodes = {"a"}
    wait_for(lambda: len(polled) >= 2, "two polls")
    dog.check()
    healths.pop(0)
    wait_for(lambda: dog._failure)
    with pytest.raises(WorkerLost, match="host-a"):
        dog.check()
    dog.stop()


def test_ray_failure_ends_all_calls() -> None:
    dog, _ = watching(NodeHealth(actors={}, ray_failure="the raylet is gone"))
    wait_for(ray_timeouts.lost_reason)
    with pytest.raises(ray_timeouts.RayLost, match="the raylet is gone"):
        dog.check()
    dog.stop()


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


@pytest.mark.e2e
def test_exited_process_does_not_cause_busy_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    process = subprocess.Popen(["sleep", "600"])

    def select(files: list[int], *_: Any) -> tuple[list[int], list[int], list[int]]:
        asked.append(list(files))
        return ([], files[1:], files[:1])[min(len(asked), 3) - 1], [], []

    monkeypatch.setattr(watchdog.select, "select", select)
    dog = Watchdog(lambda: EMPTY, print, process.pid)
    dog._thread.join(PATIENCE_S)
    assert [len(files) for files in asked] == [2, 2, 1]
    dog.stop()
    process.kill()
    process.wait()


def test_failed_poll_is_reported_once_and_retried() -> None:
    messages, polls, enough = list[str](), list[int](), threading.Event()

    def poll() -> NodeHealth:
        polls.append(1)
        if len(polls) in (1, 3):
            raise OSError("too many open files")
        if len(polls) == 5:
            enough.set()
        return KILLED if len(polls) == 4 else EMPTY

    dog = Watchdog(poll, messages.append)
    assert enough.wait(PATIENCE_S)
    dog.stop()
    failure, killed = messages
    assert "too many open files" in failure and killed == "engine 0 was killed"


def test_failing_output_hides_no_loss() -> None:
    def say(line: str) -> None:
        raise ValueError("the terminal is closed")

    dog, _ = watching(RANKS, KILLED, EMPTY, say=say)
    with pytest.raises(WorkerLost, match="trainer rank 0"):
        dog.check()
    dog.stop()


@pytest.mark.e2e
@pytest.mark.parametrize("joined", [False, True])
def test_watchdog_uses_the_right_monitor(monkeypatch: pytest.MonkeyPatch, joined: bool) -> None:
    raylet = subprocess.Popen(["sleep", "600"])
    created: list[Any] = []

    class Monitor:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            created.append((arguments, options))

        def poll(self) -> NodeHealth:
            return EMPTY

    own = {} if joined else {"raylet": [raylet.pid]}
    monkeypatch.setattr(watchdog, "own_processes", lambda: own)
    monkeypatch.setattr(watchdog, "HangDetector", Monitor)
    monkeypatch.setattr(watchdog, "ClusterMonitor", Monitor)
    with start_watchdog(print, 7.0):
        pass
    options = {"start": ray_timeouts.start(), "hang_timeout_s": 7.0}
    local = ((raylet.pid, {RAYLET: raylet.pid}), options)
    assert created == [((7.0,), {}) if joined else local]
    raylet.kill()
    raylet.wait()


POLLS = 10


class FakeNode:
    """A node monitor's handle, and its answers."""

    def __init__(self, name: str, rank: int) -> None:
        self.poll, self.requests = self, 0
        actors = {f"trainer rank {rank}": rank + 1, "node monitor": 9}
        self.health = NodeHealth(actors=actors, host=name)
        self.error: Exception | None = None

    def remote(self) -> FakeNode:
        self.requests += 1
        return self


class Cluster:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nodes = {"a": FakeNode("host-a", 0), "b": FakeNode("host-b", 1)}
        self.alive, self.now = {"a": "host-a", "b": "host-b"}, 0.0
        self.gcs = threading.Event()
        self.gcs.set()

        def answer(node: FakeNode, *, seconds: float) -> NodeHealth:
            if node.error:
                raise node.error
            return node.health

        def alive_nodes(_: ClusterMonitor) -> dict[str, str]:
            self.gcs.wait(PATIENCE_S)
            return dict(self.alive)

        patch.setattr(ClusterMonitor, "_alive_nodes", alive_nodes)
        patch.setattr(node_monitor, "_create_monitor", lambda node, _: self.nodes[node])
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


def test_slow_node_has_one_outstanding_poll(cluster: Cluster) -> None:
    slow = cluster.nodes["b"]
    slow.error = GetTimeoutError()
    for _ in range(3):
        assert cluster.poll(1.0).messages == ()
    assert (cluster.nodes["a"].requests, slow.requests) == (3, 1)
    slow.error, slow.health = None, NodeHealth(actors=slow.health.actors, messages=("killed",))
    assert cluster.poll().messages == ("killed",) and slow.requests == 1
    slow.health = NodeHealth(actors=slow.health.actors)
    assert cluster.poll().messages == () and slow.requests == 2


@pytest.mark.parametrize("error", [GetTimeoutError(), ActorUnavailableError("no route", None)])
def test_silent_node_is_reported_and_dead_one_dropped(cluster: Cluster, error: Exception) -> None:
    assert ranks(cluster.poll()) == ["trainer rank 0", "trainer rank 1"]
    cluster.nodes["b"].error = error
    assert cluster.poll(3600.0).messages == ()  # a suspended monitor does not count
    polls = [cluster.poll(ANSWER_S + POLL_S).messages for _ in range(POLLS)]
    (message,) = [line for messages in polls for line in messages]
    assert POLLS * ANSWER_S > 2 * SILENT_S
    first = next(number for number, messages in enumerate(polls) if messages)
    assert (first + 1) * (ANSWER_S + POLL_S) < 30 - ANSWER_S
    assert "host-b" in message and "trainer rank 1" in message
    assert "trainer rank 1" in cluster.poll().actors  # until Ray gives the node up
    del cluster.alive["b"]
    healths = [cluster.poll() for _ in range(POLLS)]
    assert ranks(healths[-1]) == ["trainer rank 0"]
    assert not any(health.ray_failure for health in healths)
    assert healths[-1].dead_nodes == {"b": "host-b"}


def test_hung_raylet_of_another_node_is_reported_once(cluster: Cluster) -> None:
    node = cluster.nodes["b"]
    well = node.health
    hung = NodeHealth(actors=well.actors, ray_failure="its raylet has been stopped")
    for _ in range(2):
        node.health = hung
        healths = [cluster.poll() for _ in range(3)]
        assert [health.messages for health in healths] == [(hung.ray_failure,), (), ()]
        assert all(len(ranks(health)) == 2 for health in healths)
        assert not any(health.ray_failure for health in healths)
        node.health = well
        assert cluster.poll().messages == ()


def test_silent_gcs_is_reported_then_fatal(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_monitor, "GCS_ANSWER_S", 0.01)
    for _ in range(2):  # it may answer again, and hang again
        cluster.gcs.clear()
        healths = [cluster.poll(3600.0), *(cluster.poll() for _ in range(7))]
        (message,) = [line for health in healths for line in health.messages]
        assert "GCS" in message and healths[3].messages == (message,)
        assert all(ranks(health) for health in healths)
        assert not any(health.ray_failure for health in healths)
        cluster.gcs.set()
        monkeypatch.setattr(node_monitor, "GCS_ANSWER_S", PATIENCE_S)
        assert cluster.poll().messages == ()
        monkeypatch.setattr(node_monitor, "GCS_ANSWER_S", 0.01)
    cluster.gcs.clear()
    healths = [cluster.poll() for _ in range(9)]
    assert [bool(health.ray_failure) for health in healths] == [False] * 8 + [True]
    assert f"{GCS_HANG_S:.0f} s" in healths[-1].ray_failure
    cluster.gcs.set()


def test_new_node_is_monitored(cluster: Cluster) -> None:
    cluster.nodes["c"], cluster.alive["c"] = FakeNode("host-c", 2), "host-c"
    healths = [cluster.poll() for _ in range(POLLS + 1)]
    assert "trainer rank 2" not in ranks(healths[0]) and "trainer rank 2" in ranks(healths[-1])


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


def test_can_connect() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert can_connect(f"127.0.0.1:{port}")
    assert not can_connect(f"127.0.0.1:{port}")
