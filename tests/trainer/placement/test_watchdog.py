"""What is made of what the looks find."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from keel.model import ray_timeouts
from keel.trainer.placement import watchdog as watch
from keel.trainer.placement.hang_detector import RAYLET, NodeHealth
from keel.trainer.placement.watchdog import Watchdog, start_watchdog
from keel.trainer.run.restarts import WorkerLost
from tests.waiting import PATIENCE_S, wait_for


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(watch, "POLL_S", 0.001)
    yield
    ray_timeouts.joined()


def watching(*sights: NodeHealth) -> tuple[Watchdog, list[str]]:
    """A watch that sees these, and then the last of them for good."""
    left, said, all_seen = list(sights), list[str](), threading.Event()

    def look() -> NodeHealth:
        if len(left) == 1:
            all_seen.set()
        return left.pop(0) if len(left) > 1 else left[0]

    looking = Watchdog(look, said.append)
    assert all_seen.wait(PATIENCE_S)
    return looking, said


def test_what_was_ended_is_said_once_and_is_no_end_of_the_run() -> None:
    looking, said = watching(
        NodeHealth(actors={}, messages=("engine 0 was ended",)), NodeHealth(actors={})
    )
    looking.check()
    looking.stop()
    assert said == ["engine 0 was ended"] and looking.should_stop_waiting() is False


def test_a_rank_that_is_gone_is_a_loss_that_a_new_start_mends() -> None:
    both = {"trainer rank 0": 7, "trainer rank 1": 8, "rollout engine 0": 9}
    looking, _ = watching(NodeHealth(actors=both), NodeHealth(actors={"trainer rank 0": 7}))
    wait_for(lambda: looking._failure)
    with pytest.raises(WorkerLost, match="trainer rank 1 is gone"):
        looking.should_stop_waiting()
    looking.stop()


def test_a_node_on_which_gpus_were_reserved_is_such_a_loss_and_no_other_node_is() -> None:
    sights = [
        NodeHealth(actors={}, dead_nodes={"b": "host-b"}),
        NodeHealth(actors={}, dead_nodes={"a": "host-a"}),
    ]
    seen: list[NodeHealth] = []
    looking = Watchdog(lambda: (seen.append(sights[0]), sights[0])[1], print)
    looking.nodes = {"a"}
    wait_for(lambda: len(seen) >= 2, "two looks")
    looking.check()
    sights.pop(0)
    wait_for(lambda: looking._failure)
    with pytest.raises(WorkerLost, match="host-a"):
        looking.check()
    looking.stop()


def test_rays_own_loss_ends_all_calls_of_ray() -> None:
    looking, _ = watching(
        NodeHealth(actors={}, ray_failure="Ray's node process (process 7 on here) is gone")
    )
    wait_for(ray_timeouts.lost_reason)
    with pytest.raises(
        ray_timeouts.RayLost, match=r"^Ray's node process \(process 7 on here\) is go"
    ):
        looking.check()
    looking.stop()


@pytest.mark.e2e
def test_the_end_of_a_needed_process_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_S", PATIENCE_S)
    needed, looked = subprocess.Popen(["sleep", "600"]), threading.Event()

    def look() -> NodeHealth:
        looked.set()
        return NodeHealth(actors={}, ray_failure="gone")

    looking = Watchdog(look, print, needed.pid)
    needed.kill()
    assert looked.wait(PATIENCE_S / 2), "without a look in between"
    looking.stop()
    needed.wait()


def test_a_look_that_fails_is_said_once_and_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    said, looks, enough = list[str](), list[int](), threading.Event()

    def look() -> NodeHealth:
        looks.append(1)
        if len(looks) in (1, 3):
            raise OSError("too many open files")
        if len(looks) == 5:
            enough.set()
        return NodeHealth(actors={}, messages=("engine 0 was ended",) if len(looks) == 4 else ())

    looking = Watchdog(look, said.append)
    assert enough.wait(PATIENCE_S)
    looking.stop()
    first, second = said
    assert "OSError: too many open files" in first
    assert second == "engine 0 was ended"


def test_who_cannot_be_told_loses_no_rank() -> None:
    both = {"trainer rank 0": 7, "trainer rank 1": 8}
    sights = [
        NodeHealth(actors=both),
        NodeHealth(actors={}, messages=("engine 0 was ended",)),
        NodeHealth(actors={}),
    ]
    enough = threading.Event()

    def look() -> NodeHealth:
        if len(sights) == 1:
            enough.set()
        return sights.pop(0) if len(sights) > 1 else sights[0]

    def say(line: str) -> None:
        raise ValueError("the terminal is closed")

    looking = Watchdog(look, say)
    assert enough.wait(PATIENCE_S)
    with pytest.raises(WorkerLost, match="trainer rank 0 is gone"):
        looking.check()
    looking.stop()


@pytest.mark.e2e
def test_a_needed_process_that_has_ended_is_no_reason_to_look_without_a_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the looks do not find it gone, or fail."""
    asked: list[list[int]] = []
    needed = subprocess.Popen(["sleep", "600"])

    def select(waking: list[int], *_: Any) -> tuple[list[int], list[int], list[int]]:
        asked.append(list(waking))
        return ([], waking[1:], waking[:1])[min(len(asked), 3) - 1], [], []

    monkeypatch.setattr(watch.select, "select", select)
    looking = Watchdog(lambda: NodeHealth(actors={}), print, needed.pid)
    looking._thread.join(PATIENCE_S)
    assert [len(waking) for waking in asked] == [2, 2, 1]
    looking.stop()
    needed.kill()
    needed.wait()


@pytest.mark.e2e
@pytest.mark.parametrize("joined", [False, True])
def test_who_looks_knows_the_knob_and_whose_run_it_is(
    monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    raylet = subprocess.Popen(["sleep", "600"])
    given: list[Any] = []

    class Looks:
        def __init__(self, *given_: Any, **named: Any) -> None:
            given.append((given_, named))

        def poll(self) -> NodeHealth:
            return NodeHealth(actors={})

    own = {} if joined else {"raylet": [raylet.pid]}
    monkeypatch.setattr(watch, "own_processes", lambda: own)
    monkeypatch.setattr(watch, "HangDetector", Looks)
    monkeypatch.setattr(watch, "ClusterMonitor", Looks)
    with start_watchdog(print, 7.0):
        pass
    here = (
        (raylet.pid, {RAYLET: raylet.pid}),
        {"start": ray_timeouts.start(), "hang_timeout_s": 7.0},
    )
    assert given == [((7.0,), {}) if joined else here]
    raylet.kill()
    raylet.wait()
