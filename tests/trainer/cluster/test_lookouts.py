"""What is made of what the nodes of a cluster see."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from keel.model import ray_calls
from keel.trainer.cluster import lookouts
from keel.trainer.cluster.lookouts import ANSWER_S, NODES_EVERY, SILENT_S, Lookouts
from keel.trainer.cluster.looks import Sight


class Node:
    """An actor that looks, on a node, and what it answers."""

    def __init__(self, name: str, rank: int) -> None:
        self.look, self.asked = self, 0
        self.sight = Sight(here={f"trainer rank {rank}": rank + 1, "lookout": 9}, host=name)
        self.error: Exception | None = None

    def remote(self) -> Node:
        self.asked += 1
        return self


class Cluster:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nodes = {"a": Node("host-a", 0), "b": Node("host-b", 1)}
        self.alive, self.now = {"a": "host-a", "b": "host-b"}, 0.0

        def answer(node: Node, *, seconds: float) -> Sight:
            if node.error:
                raise node.error
            return node.sight

        patch.setattr(Lookouts, "_hosts", lambda _: dict(self.alive))
        patch.setattr(lookouts, "_lookout", lambda node, seconds: self.nodes[node])
        patch.setattr(ray_calls, "get", answer)
        self._lookouts = Lookouts(100.0, lambda: self.now)

    def look(self, seconds: float = ANSWER_S) -> Sight:
        self.now += seconds
        return self._lookouts.look()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def ranks(sight: Sight) -> list[str]:
    return sorted(name for name in sight.here if name != "lookout")


def test_a_slow_node_has_one_look_to_answer_and_no_answer_is_lost(cluster: Cluster) -> None:
    slow = cluster.nodes["b"]
    slow.error = GetTimeoutError()
    for _ in range(3):
        assert cluster.look(1.0).said == ()
    assert (cluster.nodes["a"].asked, slow.asked) == (3, 1)
    slow.error, slow.sight = None, Sight(here=slow.sight.here, said=("engine 3 was ended",))
    assert cluster.look().said == ("engine 3 was ended",) and slow.asked == 1
    slow.sight = Sight(here=slow.sight.here)
    assert cluster.look().said == () and slow.asked == 2


@pytest.mark.parametrize("error", [GetTimeoutError(), ActorUnavailableError("no route", None)])
def test_a_node_that_is_silent_is_said_and_one_that_is_dead_takes_its_ranks_with_it(
    cluster: Cluster, error: Exception
) -> None:
    assert ranks(cluster.look()) == ["trainer rank 0", "trainer rank 1"]
    cluster.nodes["b"].error = error
    assert cluster.look(3600.0).said == (), "while nobody asked, nobody was silent"
    said = [line for _ in range(NODES_EVERY) for line in cluster.look().said]
    assert len(said) == 1 and NODES_EVERY * ANSWER_S > 2 * SILENT_S
    assert said[0].startswith("node host-b does not answer (")
    assert said[0].endswith("; on it: trainer rank 1")
    assert "trainer rank 1" in cluster.look().here, "Ray has the last word on who is dead"
    del cluster.alive["b"]
    sights = [cluster.look() for _ in range(NODES_EVERY)]
    assert ranks(sights[-1]) == ["trainer rank 0"] and not any(sight.lost for sight in sights)


def test_a_raylet_that_stands_still_is_said_once_and_not_the_end_of_all(cluster: Cluster) -> None:
    there = cluster.nodes["b"]
    well, frozen = there.sight, Sight(here=there.sight.here, lost="its raylet has been stopped")
    for _ in range(2):
        there.sight = frozen
        sights = [cluster.look() for _ in range(3)]
        assert [sight.said for sight in sights] == [(frozen.lost,), (), ()]
        assert all(ranks(sight) == ["trainer rank 0", "trainer rank 1"] for sight in sights)
        assert not any(sight.lost for sight in sights), "it is another node's, and Ray's business"
        there.sight = well
        assert cluster.look().said == ()
