"""What is made of what the looks find."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from keel.model import ray_calls
from keel.trainer.cluster import watch
from keel.trainer.cluster.looks import Sight
from keel.trainer.cluster.watch import NODES_EVERY, SILENT, Lookouts, Watch
from keel.trainer.run.restarts import Lost
from tests.waiting import PATIENCE_S, wait_for


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(watch, "LOOK_S", 0.001)
    yield
    ray_calls.joined()


def watching(*sights: Sight) -> tuple[Watch, list[str]]:
    """A watch that sees these, and then the last of them for good."""
    left, said, all_seen = list(sights), list[str](), threading.Event()

    def look() -> Sight:
        if len(left) == 1:
            all_seen.set()
        return left.pop(0) if len(left) > 1 else left[0]

    looking = Watch(look, said.append)
    assert all_seen.wait(PATIENCE_S)
    return looking, said


def test_what_was_ended_is_said_once_and_is_no_end_of_the_run() -> None:
    looking, said = watching(Sight(here={}, ended=("engine 0 was ended",)), Sight(here={}))
    looking.check()
    looking.stop()
    assert said == ["engine 0 was ended"] and looking.well() is False


def test_a_rank_that_is_gone_is_a_loss_that_a_new_start_mends() -> None:
    both = {"trainer rank 0": 7, "trainer rank 1": 8, "rollout engine 0": 9}
    looking, _ = watching(Sight(here=both), Sight(here={"trainer rank 0": 7}))
    wait_for(lambda: looking._failure)
    with pytest.raises(Lost, match="trainer rank 1 is gone"):
        looking.well()
    looking.stop()


def test_rays_own_loss_ends_all_calls_of_ray() -> None:
    looking, _ = watching(Sight(here={}, lost="Ray's node process (process 7 on here) is gone"))
    wait_for(ray_calls.lost)
    with pytest.raises(ray_calls.RayLost, match=r"^Ray's node process \(process 7 on here\) is go"):
        looking.check()
    looking.stop()


def test_the_end_of_a_needed_process_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_S", PATIENCE_S)
    needed, looked = subprocess.Popen(["sleep", "600"]), threading.Event()

    def look() -> Sight:
        looked.set()
        return Sight(here={}, lost="gone")

    looking = Watch(look, print, needed.pid)
    needed.kill()
    assert looked.wait(PATIENCE_S / 2), "without a look in between"
    looking.stop()
    needed.wait()


class Node:
    """An actor that looks, on a node."""

    def __init__(self, sight: Sight) -> None:
        self.look, self.sight = self, sight
        self.answers = True

    def remote(self) -> Node:
        return self


def test_a_node_that_is_silent_is_said_and_one_that_is_dead_takes_its_ranks_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive = {"a": "host-a", "b": "host-b"}
    nodes = {
        "a": Node(Sight(here={"trainer rank 0": 1}, host="host-a", ended=("seen on a",))),
        "b": Node(Sight(here={"trainer rank 1": 2}, host="host-b")),
    }

    def answer(node: Node, **_: Any) -> Sight:
        if not node.answers:
            raise GetTimeoutError
        return node.sight

    monkeypatch.setattr(Lookouts, "_hosts", lambda _: dict(alive))
    monkeypatch.setattr(watch, "_lookout", nodes.__getitem__)
    monkeypatch.setattr(ray_calls, "get", answer)
    lookouts = Lookouts()
    first = lookouts.look()
    assert first.here == {"trainer rank 0": 1, "trainer rank 1": 2}
    assert first.ended == ("seen on a",)
    nodes["b"].answers = False
    said = [line for _ in range(NODES_EVERY) for line in lookouts.look().ended if "b" in line]
    assert said == ["node host-b does not answer; on it: trainer rank 1"] and SILENT < NODES_EVERY
    assert "trainer rank 1" in lookouts.look().here, "Ray has the last word on who is dead"
    del alive["b"]
    wait_for(lambda: "trainer rank 1" not in lookouts.look().here)
