"""What is made of what the nodes of a cluster see."""

from __future__ import annotations

import socket
import threading

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from keel.model import ray_timeouts
from keel.trainer.placement import node_monitor as lookouts
from keel.trainer.placement.hang_detector import POLL_S, NodeHealth
from keel.trainer.placement.node_monitor import (
    ANSWER_S,
    CONNECT_S,
    PARTITION_S,
    SILENT_S,
    ClusterMonitor,
    PartitionTimer,
    can_connect,
)
from tests.waiting import PATIENCE_S

LOOKS = 10


class Node:
    """An actor that looks, on a node, and what it answers."""

    def __init__(self, name: str, rank: int) -> None:
        self.poll, self.asked = self, 0
        self.sight = NodeHealth(
            actors={f"trainer rank {rank}": rank + 1, "node monitor": 9}, host=name
        )
        self.error: Exception | None = None

    def remote(self) -> Node:
        self.asked += 1
        return self


class Cluster:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nodes = {"a": Node("host-a", 0), "b": Node("host-b", 1)}
        self.alive, self.now = {"a": "host-a", "b": "host-b"}, 0.0

        def answer(node: Node, *, seconds: float) -> NodeHealth:
            if node.error:
                raise node.error
            return node.sight

        self.gcs = threading.Event()
        self.gcs.set()

        def hosts(_: ClusterMonitor) -> dict[str, str]:
            self.gcs.wait(PATIENCE_S)
            return dict(self.alive)

        patch.setattr(ClusterMonitor, "_alive_nodes", hosts)
        patch.setattr(lookouts, "_create_monitor", lambda node, seconds: self.nodes[node])
        patch.setattr(ray_timeouts, "get", answer)
        self.lookouts = ClusterMonitor(100.0, lambda: self.now)

    def poll(self, seconds: float = ANSWER_S) -> NodeHealth:
        self.now += seconds
        return self.lookouts.poll()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def ranks(sight: NodeHealth) -> list[str]:
    return sorted(name for name in sight.actors if name != "node monitor")


def test_a_slow_node_has_one_look_to_answer_and_no_answer_is_lost(cluster: Cluster) -> None:
    slow = cluster.nodes["b"]
    slow.error = GetTimeoutError()
    for _ in range(3):
        assert cluster.poll(1.0).messages == ()
    assert (cluster.nodes["a"].asked, slow.asked) == (3, 1)
    slow.error, slow.sight = (
        None,
        NodeHealth(actors=slow.sight.actors, messages=("engine 3 was ended",)),
    )
    assert cluster.poll().messages == ("engine 3 was ended",) and slow.asked == 1
    slow.sight = NodeHealth(actors=slow.sight.actors)
    assert cluster.poll().messages == () and slow.asked == 2


@pytest.mark.parametrize("error", [GetTimeoutError(), ActorUnavailableError("no route", None)])
def test_a_node_that_is_silent_is_said_and_one_that_is_dead_takes_its_ranks_with_it(
    cluster: Cluster, error: Exception
) -> None:
    assert ranks(cluster.poll()) == ["trainer rank 0", "trainer rank 1"]
    cluster.nodes["b"].error = error
    assert cluster.poll(3600.0).messages == (), "while nobody asked, nobody was silent"
    looks = [cluster.poll(ANSWER_S + POLL_S).messages for _ in range(LOOKS)]
    (said,) = [line for look in looks for line in look]
    assert LOOKS * ANSWER_S > 2 * SILENT_S
    first = next(number for number, look in enumerate(looks) if look)
    assert (first + 1) * (ANSWER_S + POLL_S) < 30 - ANSWER_S, "and a look was under way"
    assert said.startswith("node host-b does not answer (")
    assert "trainer rank 1" in said
    assert "trainer rank 1" in cluster.poll().actors, "Ray has the last word on who is dead"
    del cluster.alive["b"]
    sights = [cluster.poll() for _ in range(LOOKS)]
    assert ranks(sights[-1]) == ["trainer rank 0"] and not any(
        sight.ray_failure for sight in sights
    )
    assert sights[-1].dead_nodes == {"b": "host-b"}


def test_a_raylet_that_stands_still_is_said_once_and_not_the_end_of_all(cluster: Cluster) -> None:
    there = cluster.nodes["b"]
    well, frozen = (
        there.sight,
        NodeHealth(actors=there.sight.actors, ray_failure="its raylet has been stopped"),
    )
    for _ in range(2):
        there.sight = frozen
        sights = [cluster.poll() for _ in range(3)]
        assert [sight.messages for sight in sights] == [(frozen.ray_failure,), (), ()]
        assert all(ranks(sight) == ["trainer rank 0", "trainer rank 1"] for sight in sights)
        assert not any(sight.ray_failure for sight in sights), (
            "it is another node's, and Ray's business"
        )
        there.sight = well
        assert cluster.poll().messages == ()


def test_a_control_service_that_does_not_answer_is_said_and_then_the_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookouts, "GCS_ANSWER_S", 0.01)
    for _ in range(2):  # it may come back, and be silent again
        cluster.gcs.clear()
        asked = [cluster.poll(3600.0), *(cluster.poll() for _ in range(7))]
        (line,) = [line for sight in asked for line in sight.messages]
        assert line.startswith("Ray's control service (GCS), on the cluster's first node, has not ")
        assert line.endswith("not answered for 15 s. After 40 s the run ends")
        assert asked[3].messages == (line,) and all(ranks(sight) for sight in asked)
        assert not any(sight.ray_failure for sight in asked)
        cluster.gcs.set()
        monkeypatch.setattr(lookouts, "GCS_ANSWER_S", PATIENCE_S)
        assert cluster.poll().messages == ()
        monkeypatch.setattr(lookouts, "GCS_ANSWER_S", 0.01)
    cluster.gcs.clear()
    sights = [cluster.poll() for _ in range(9)]
    assert [bool(sight.ray_failure) for sight in sights] == [False] * 8 + [True]
    assert "has not answered for 40 s" in sights[-1].ray_failure
    cluster.gcs.set()


def test_a_node_that_joins_later_is_looked_at_too(cluster: Cluster) -> None:
    cluster.nodes["c"], cluster.alive["c"] = Node("host-c", 2), "host-c"
    sights = [cluster.poll() for _ in range(LOOKS + 1)]
    assert "trainer rank 2" not in ranks(sights[0]) and "trainer rank 2" in ranks(sights[-1])


def test_a_node_is_cut_off_when_no_try_in_a_row_has_come_through() -> None:
    now, reaches = 0.0, False
    away = PartitionTimer(lambda: reaches, lambda: now)

    def tries(seconds: float) -> bool:
        nonlocal now
        cut_off = False
        for _ in range(int(seconds / CONNECT_S)):
            now += CONNECT_S
            cut_off = away.expired()
        return cut_off

    assert not tries(PARTITION_S - CONNECT_S), "Ray may have it yet"
    reaches = True
    assert not tries(CONNECT_S)
    reaches = False
    assert not tries(PARTITION_S - CONNECT_S), "counted anew"
    now += 3600.0  # its machine slept: one try has failed, and no hour of them
    assert not PartitionTimer(lambda: False, lambda: now).expired()
    assert tries(CONNECT_S)


def test_whether_rays_control_service_can_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert can_connect(f"127.0.0.1:{port}")
    assert not can_connect(f"127.0.0.1:{port}")
