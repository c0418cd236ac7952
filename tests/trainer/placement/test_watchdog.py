"""The watchdog, the monitors of a cluster's nodes, and the detection of hung processes."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from keel.model import ray_timeouts
from keel.model.ray_timeouts import NAME
from keel.trainer.placement import processes, watchdog
from keel.trainer.placement.processes import (
    _IDLE_S,
    _RAY_HANG_S,
    POLL_S,
    WARN_S,
    HangDetector,
    NodeHealth,
)
from keel.trainer.placement.watchdog import (
    _ANSWER_S,
    _PARTITION_S,
    CONNECT_S,
    Watchdog,
    _ClusterMonitor,
    _PartitionTimer,
)
from keel.trainer.run.restarts import WorkerLost
from tests.waiting import PATIENCE_S, wait_for

EMPTY = NodeHealth(actors={})
KILLED = NodeHealth(actors={}, messages=("engine 0 was killed",))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(watchdog, "POLL_S", 0.001)
    yield
    ray_timeouts.new_session()


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
        self.monitor = _ClusterMonitor(100.0, lambda: self.now)

    def poll(self, seconds: float = _ANSWER_S) -> NodeHealth:
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
    polls = [cluster.poll(_ANSWER_S + POLL_S).messages for _ in range(POLLS)]
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
        monkeypatch.setattr(watchdog, "_GCS_ANSWER_S", 0.01)
        cluster.gcs.clear()
        healths = [cluster.poll(3600.0), *(cluster.poll() for _ in range(7))]
        (message,) = [line for health in healths for line in health.messages]
        assert "GCS" in message and healths[3].messages == (message,)
        assert not any(health.ray_failure for health in healths)
        if answers:
            cluster.gcs.set()
            monkeypatch.setattr(watchdog, "_GCS_ANSWER_S", PATIENCE_S)
            assert cluster.poll().messages == ()
    assert cluster.poll().ray_failure
    cluster.gcs.set()


def test_partition_needs_failures_in_a_row() -> None:
    now, connects = 0.0, False
    timer = _PartitionTimer(lambda: connects, lambda: now)

    def attempts(seconds: float) -> bool:
        nonlocal now
        expired = False
        for _ in range(int(seconds / CONNECT_S)):
            now += CONNECT_S
            expired = timer.expired()
        return expired

    assert not attempts(_PARTITION_S - CONNECT_S)
    connects = True
    assert not attempts(CONNECT_S)
    connects = False
    assert not attempts(_PARTITION_S - CONNECT_S)
    now += 3600.0  # a machine that slept has failed once
    assert not _PartitionTimer(lambda: False, lambda: now).expired()
    assert attempts(CONNECT_S)


START, RAYLET, ENGINE, WORKER, OTHER = "this", 100, 7, 8, 9
STOPPED = "T (stopped)"
LONG_S = 100.0


class Machine:
    """A fake /proc with a raylet, and a list of killed processes."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root, self.now, self.killed = root, 0.0, list[int]()
        (root / "stat").write_text("btime 0\n")
        patch.setattr(psutil, "PROCFS_PATH", str(root))
        patch.setattr(processes, "kill", self._kill)
        self.add(RAYLET, parent=0)

    def detector(self, hang_timeout_s: float = LONG_S, **ray: int) -> HangDetector:
        return HangDetector(
            RAYLET, ray, start=START, hang_timeout_s=hang_timeout_s, clock=lambda: self.now
        )

    def poll(self, detector: HangDetector, seconds: float = POLL_S) -> NodeHealth:
        self.now += seconds
        return detector.poll()

    def run(self, detector: HangDetector, seconds: float) -> list[str]:
        """Let `seconds` pass. Every process that is not stopped makes progress."""
        messages: list[str] = []
        for turn in range(round(seconds / POLL_S)):
            for pid in (RAYLET, ENGINE, OTHER):
                status = self._root / f"{pid}/task/{pid}/status"
                if status.exists() and "(sleeping)" in status.read_text():
                    self.threads(pid, pid, switches=f"{self.now} {turn}")
            messages += self.poll(detector).messages
        return messages

    def add(
        self, pid: int, name: str = "", *, parent: int = RAYLET, start: str = START, born: int = 1
    ) -> None:
        """Add a process with one thread. `born` is its start time in clock ticks after boot."""
        fields = ["S", str(parent), *["0"] * 17, str(born), *["0"] * 30]
        self.threads(pid, pid)
        (self._root / f"{pid}/stat").write_text(f"{pid} (it) {' '.join(fields)}")
        (self._root / f"{pid}/task/{pid}/children").write_text("")
        mark = f"{NAME}={start}/{name}\0" if name else "HOME=/\0"
        (self._root / f"{pid}/environ").write_text(mark)
        if parent:
            path = self._root / f"{parent}/task/{parent}/children"
            path.write_text(path.read_text() + f"{pid} ")

    def threads(
        self,
        pid: int,
        *tids: int,
        state: str = "S (sleeping)",
        tracer: int = 0,
        switches: str = "1",
    ) -> None:
        for tid in tids:
            folder = self._root / f"{pid}/task/{tid}"
            folder.mkdir(parents=True, exist_ok=True)
            counts = f"voluntary_ctxt_switches:\t{switches}\nnonvoluntary_ctxt_switches:\t0\n"
            status = f"Name:\tit\nState:\t{state}\nTracerPid:\t{tracer}\n"
            (folder / "status").write_text(status + (counts if switches else ""))

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
    machine.threads(stopped, stopped, state=STOPPED)
    (line,) = machine.run(detector, LONG_S - 2 * POLL_S)
    assert "engine 0" in line and f"{WARN_S:g} s" in line and machine.killed == []
    assert len(machine.run(detector, 2 * POLL_S)) == 1 and machine.killed == [ENGINE, WORKER]
    assert machine.poll(detector).actors == {"engine 1": OTHER}


def test_resumed_process_and_suspended_monitor_start_over(machine: Machine) -> None:
    detector = machine.detector()
    for _ in range(2):
        machine.threads(ENGINE, ENGINE, state=STOPPED)
        assert len(machine.run(detector, LONG_S - POLL_S)) == 1
        machine.threads(ENGINE, ENGINE)
        assert machine.run(detector, POLL_S) == [] == machine.killed
    machine.threads(ENGINE, ENGINE, state=STOPPED)
    for seconds in [3600.0] * 9 + [0.001] * 200:  # time without polls does not count
        assert machine.poll(detector, seconds).messages == ()
    assert machine.killed == []


def test_process_without_running_threads_is_killed(machine: Machine) -> None:
    detector, many = machine.detector(5.0), range(1000, 1050)
    for turn in range(30):
        machine.threads(ENGINE, ENGINE, *many[:turn], switches=str(turn))
        machine.poll(detector)
    machine.threads(ENGINE, many[7], switches="the last")
    polls = 2 + round(_IDLE_S / POLL_S)  # it may have run in the first two
    messages = [m for _ in range(polls) for m in machine.poll(detector).messages]
    assert len(messages) == 2 and machine.killed == [ENGINE, WORKER]


@pytest.mark.parametrize("counted", [True, False])
def test_one_running_thread_is_enough(machine: Machine, counted: bool) -> None:
    machine.threads(ENGINE, ENGINE, switches="1" if counted else "")
    detector = machine.detector(5.0)
    for turn in range(3 * round(_IDLE_S / POLL_S)):
        if counted:
            machine.threads(ENGINE, 1000 + turn % 2, switches=str(turn))
        assert not machine.poll(detector).messages


def test_other_runs_are_left_alone(machine: Machine) -> None:
    machine.add(OTHER, "engine 0", start="another")
    machine.add(10, "engine 0", start="another", parent=ENGINE)  # a run inside this run
    machine.add(11, parent=ENGINE)  # an environment, which the policy may stop
    for pid in (OTHER, 10, 11):
        machine.threads(pid, pid, state=STOPPED)
    detector = machine.detector()
    assert machine.run(detector, 2 * LONG_S) == [] == machine.killed
    assert machine.poll(detector).actors == {"engine 0": ENGINE}


def test_hung_ray_process_is_a_failure(machine: Machine) -> None:
    detector = machine.detector(raylet=RAYLET)
    assert not machine.poll(detector).ray_failure
    machine.threads(RAYLET, RAYLET, state=STOPPED)
    assert len(machine.run(detector, _RAY_HANG_S - POLL_S)) == 1
    assert not detector.poll().ray_failure
    health = machine.poll(detector)
    assert "raylet" in health.ray_failure
    assert health.actors == {"engine 0": ENGINE} and machine.killed == []
    machine.remove(RAYLET)
    assert machine.poll(detector).ray_failure
    assert machine.killed == [ENGINE, WORKER]
