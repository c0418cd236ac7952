"""The watchdog, the monitors of a cluster's nodes, and the detection of hung processes."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from keel.model import ray_timeouts
from keel.model.ray_timeouts import NAME, NODE_LOST_S
from keel.trainer.placement import watchdog
from keel.trainer.placement.watchdog import (
    _ANSWER_S,
    _CONNECT_S,
    _POLL_S,
    _RAY_HANG_S,
    _WARN_S,
    Watchdog,
    _ClusterMonitor,
    _HangDetector,
    _NodeHealth,
    _wait_for_partition,
)
from keel.trainer.run.errors import WorkerLost
from tests.waiting import wait_for

EMPTY = _NodeHealth()
KILLED = _NodeHealth(messages=("engine 0 was killed",))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(watchdog, "_POLL_S", 0.001)
    yield
    ray_timeouts.new_session()


class Dog(Watchdog):
    """A watchdog with a script of poll results. The last result is repeated forever."""

    def __init__(self, *script: _NodeHealth | Exception) -> None:
        self.script, self.messages, self.done = list(script), list[str](), threading.Event()
        super().__init__(self.scripted, self.messages.append)

    def scripted(self) -> _NodeHealth:
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
    ranks = _NodeHealth(actors=("trainer rank 0", "trainer rank 1", "rollout engine 0"))
    Dog(ranks, _NodeHealth(actors=("trainer rank 0",))).fails(WorkerLost, "trainer rank 1")
    dead = _NodeHealth(ray_failure="the raylet is gone")
    Dog(dead).fails(ray_timeouts.RayLost, "the raylet is gone")


def test_missing_node_with_reserved_gpus_is_a_loss() -> None:
    other, needed = (_NodeHealth(dead_nodes={name: f"host-{name}"}) for name in "ba")
    dog = Dog(other)
    dog.nodes = {"a"}
    dog.check()
    dog.script = [other, needed]
    dog.fails(WorkerLost, "host-a")


POLLS = 10


class FakeNode:
    """A handle of a node monitor that returns scripted answers."""

    def __init__(self, rank: int) -> None:
        self.poll, self.requests = self, 0
        self.health = _NodeHealth(actors=(f"trainer rank {rank}", "node monitor"))
        self.error: Exception | None = None

    def remote(self) -> FakeNode:
        self.requests += 1
        return self


class Cluster:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nodes = {name: FakeNode(rank) for rank, name in enumerate("abc")}
        self.alive, self.now = {"a": "host-a", "b": "host-b"}, 0.0
        self.gcs, self.queries = True, list[Future[dict[str, str]]]()

        def answer(node: FakeNode, *, seconds: float) -> _NodeHealth:
            if node.error:
                raise node.error
            return node.health

        def on_thread(call: Callable[[], dict[str, str]], _: str) -> Future[dict[str, str]]:
            self.queries.append(Future())
            if self.gcs:
                self.queries[-1].set_result(call())
            return self.queries[-1]

        patch.setattr(watchdog, "_alive_nodes", lambda: dict(self.alive))
        patch.setattr(watchdog, "on_thread", on_thread)
        patch.setattr(watchdog, "_create_monitor", lambda node, _: self.nodes[node])
        patch.setattr(ray_timeouts, "get", answer)
        self.monitor = _ClusterMonitor(100.0, lambda: self.now)

    def poll(self, seconds: float = _ANSWER_S) -> _NodeHealth:
        self.now += seconds
        return self.monitor.poll()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def ranks(health: _NodeHealth) -> list[str]:
    return sorted(name for name in health.actors if name != "node monitor")


@pytest.mark.parametrize("error", [GetTimeoutError(), ActorUnavailableError("no route", None)])
def test_silent_node_is_reported_and_dead_one_replaced(cluster: Cluster, error: Exception) -> None:
    assert ranks(cluster.poll()) == ["trainer rank 0", "trainer rank 1"]
    cluster.nodes["b"].error = error
    assert cluster.poll(3600.0).messages == ()  # a suspended monitor does not count
    polls = [cluster.poll(_ANSWER_S + _POLL_S).messages for _ in range(POLLS)]
    (message,) = [line for messages in polls for line in messages]
    assert any(polls[:4]) and "host-b" in message and "trainer rank 1" in message
    assert "trainer rank 1" in cluster.poll().actors  # until Ray gives the node up
    cluster.alive = {"a": "host-a", "c": "host-c"}
    healths = [cluster.poll() for _ in range(POLLS)]
    assert ranks(healths[-1]) == ["trainer rank 0", "trainer rank 2"]
    assert not any(health.ray_failure for health in healths)
    assert healths[-1].dead_nodes == {"b": "host-b"}


def test_silent_gcs_delays_no_poll_until_it_is_a_failure(cluster: Cluster) -> None:
    assert not cluster.poll().ray_failure
    cluster.gcs = False
    cluster.nodes["a"].health = KILLED
    for _ in range(POLLS):
        health = cluster.poll()
        assert KILLED.messages == health.messages and not health.ray_failure
    assert len(cluster.queries) == 2
    cluster.queries[-1].set_exception(ray_timeouts.Unanswered("the GCS does not answer"))
    assert "GCS" in cluster.poll().ray_failure


def test_partition_needs_failures_in_a_row() -> None:
    now, attempts = 0.0, 0

    def pause(seconds: float) -> None:
        nonlocal now
        now += 3600.0 if attempts == 3 else seconds  # a machine that slept has failed once

    def connects() -> bool:
        nonlocal attempts
        attempts += 1
        return attempts == 10

    _wait_for_partition(connects, lambda: now, pause)
    assert attempts == 10 + NODE_LOST_S / _CONNECT_S


START, RAYLET, ENGINE, WORKER, OTHER = "this", 100, 7, 8, 9
LONG_S = 100.0


class Machine:
    """A fake /proc with a raylet, and a list of killed processes."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root, self.now, self.killed = root, 0.0, list[int]()
        (root / "stat").write_text("btime 0\n")
        patch.setattr(psutil, "PROCFS_PATH", str(root))
        patch.setattr(watchdog, "kill", self._kill)
        patch.setattr(watchdog, "_POLL_S", _POLL_S)
        self.add(RAYLET, parent=0)

    def detector(self, hang_timeout_s: float = LONG_S, **ray: int) -> _HangDetector:
        return _HangDetector(
            RAYLET, ray, start=START, hang_timeout_s=hang_timeout_s, clock=lambda: self.now
        )

    def poll(self, detector: _HangDetector, seconds: float = _POLL_S) -> _NodeHealth:
        self.now += seconds
        return detector.poll()

    def run(self, detector: _HangDetector, seconds: float) -> list[str]:
        polls = range(round(seconds / _POLL_S))
        return [message for _ in polls for message in self.poll(detector).messages]

    def add(self, pid: int, name: str = "", *, parent: int = RAYLET, start: str = START) -> None:
        (self._root / str(pid)).mkdir()
        mark = f"{NAME}={start}/{name}\0" if name else "HOME=/\0"
        (self._root / f"{pid}/environ").write_text(mark)
        fields = ["S", str(parent), *["0"] * 17, "1", *["0"] * 30]
        (self._root / f"{pid}/stat").write_text(f"{pid} (it) {' '.join(fields)}")

    def state(self, pid: int, state: str) -> None:
        path = self._root / f"{pid}/stat"
        name, _, fields = path.read_text().partition(") ")
        path.write_text(f"{name}) {state}{fields[1:]}")

    def hide_environment(self, pid: int) -> None:
        (self._root / f"{pid}/environ").write_text("")

    def remove(self, pid: int) -> None:
        shutil.rmtree(self._root / str(pid))

    def _kill(self, processes: list[psutil.Process]) -> str:
        for process in processes:
            self.killed.append(process.pid)
            self.remove(process.pid)
        return ""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with an engine that has started a worker process."""
    machine = Machine(tmp_path, monkeypatch)
    machine.add(ENGINE, "engine 0")
    machine.add(WORKER, "engine 0", parent=ENGINE)
    return machine


@pytest.mark.parametrize("stopped", [ENGINE, WORKER])
def test_stopped_tree_is_reported_once_then_killed(machine: Machine, stopped: int) -> None:
    detector = machine.detector()
    machine.add(OTHER, "engine 1")
    assert machine.run(detector, LONG_S) == []
    machine.state(stopped, "T")
    (line,) = machine.run(detector, LONG_S - 2 * _POLL_S)
    assert "engine 0" in line and f"{_WARN_S:g} s" in line and machine.killed == []
    assert len(machine.run(detector, 2 * _POLL_S)) == 1 and machine.killed == [ENGINE, WORKER]
    assert machine.poll(detector).actors == ("engine 1",)


def test_resumed_process_and_suspended_monitor_start_over(machine: Machine) -> None:
    detector = machine.detector()
    for _ in range(2):
        machine.state(ENGINE, "T")
        assert len(machine.run(detector, LONG_S - _POLL_S)) == 1
        machine.state(ENGINE, "S")
        assert machine.run(detector, _POLL_S) == [] == machine.killed
    machine.state(ENGINE, "T")
    for seconds in [3600.0] * 9 + [0.001] * 200:  # time without polls does not count
        assert machine.poll(detector, seconds).messages == ()
    assert machine.killed == []


def test_other_runs_are_left_alone(machine: Machine) -> None:
    machine.add(OTHER, "engine 0", start="another")
    machine.add(10, "engine 0", start="another", parent=ENGINE)  # a run inside this run
    machine.add(11, parent=ENGINE)  # an environment, which the policy may stop
    machine.state(ENGINE, "t")  # in a debugger
    for pid in (OTHER, 10, 11):
        machine.state(pid, "T")
    detector = machine.detector()
    assert machine.run(detector, 2 * LONG_S) == [] == machine.killed
    assert machine.poll(detector).actors == ("engine 0",)


def test_actor_with_an_unreadable_environment_stays(machine: Machine) -> None:
    detector = machine.detector()
    assert machine.poll(detector).actors == ("engine 0",)
    machine.hide_environment(ENGINE)
    assert machine.poll(detector).actors == ("engine 0",)


def test_hung_ray_process_is_a_failure(machine: Machine) -> None:
    detector = machine.detector(raylet=RAYLET)
    assert not machine.poll(detector).ray_failure
    machine.state(RAYLET, "T")
    assert len(machine.run(detector, _RAY_HANG_S - _POLL_S)) == 1
    assert not detector.poll().ray_failure
    health = machine.poll(detector)
    assert "raylet" in health.ray_failure
    assert health.actors == ("engine 0",) and machine.killed == []
    machine.remove(RAYLET)
    assert machine.poll(detector).ray_failure
    assert machine.killed == [ENGINE, WORKER]
