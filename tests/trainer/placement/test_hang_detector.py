"""Hung processes are reported, then killed; all others are left alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from keel.model.ray_timeouts import NAME
from keel.trainer.placement import hang_detector
from keel.trainer.placement.hang_detector import (
    IDLE_S,
    POLL_S,
    RAY_HANG_S,
    WARN_S,
    HangDetector,
    NodeHealth,
)
from keel.trainer.placement.processes import available_cores
from tests.waiting import PATIENCE_S, wait_for

START, RAYLET, ENGINE, WORKER, OTHER = "this", 100, 7, 8, 9
STOPPED = "T (stopped)"
LONG_S = 100.0


class Machine:
    """A fake /proc with a raylet, and the processes that were killed."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root, self.now, self.killed = root, 0.0, list[int]()
        (root / "stat").write_text("btime 0\n")
        patch.setattr(psutil, "PROCFS_PATH", str(root))
        patch.setattr(hang_detector, "kill", self._kill)
        self.add(RAYLET, parent=0)

    def detector(self, hang_timeout_s: float, **ray: int) -> HangDetector:
        return HangDetector(
            RAYLET, ray, start=START, hang_timeout_s=hang_timeout_s, clock=lambda: self.now
        )

    def poll(self, detector: HangDetector, seconds: float = POLL_S) -> NodeHealth:
        self.now += seconds
        return detector.poll()

    def run(self, detector: HangDetector, seconds: float) -> list[str]:
        """Run for `seconds`; every process makes progress unless stopped."""
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
        """Add a process with one thread; born: clock ticks after boot."""
        fields = ["S", str(parent), *["0"] * 17, str(born), *["0"] * 30]
        self.threads(pid, pid)
        (self._root / f"{pid}/stat").write_text(f"{pid} (it) {' '.join(fields)}")
        (self._root / f"{pid}/task/{pid}/children").write_text("")
        self.mark(pid, name, start)
        if parent:
            path = self._root / f"{parent}/task/{parent}/children"
            path.write_text(path.read_text() + f"{pid} ")

    def mark(self, pid: int, name: str, start: str = START) -> None:
        mark = f"{NAME}={start}/{name}\0" if name else "HOME=/\0"
        (self._root / f"{pid}/environ").write_text(mark)

    def hide_children(self, pid: int) -> None:
        (self._root / f"{pid}/task/{pid}/children").write_text("")

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
    """A machine with an engine that has started a worker."""
    machine = Machine(tmp_path, monkeypatch)
    machine.add(ENGINE, "engine 0")
    machine.add(WORKER, "engine 0", parent=ENGINE)
    return machine


@pytest.mark.parametrize("stopped", [ENGINE, WORKER])
def test_stopped_tree_is_reported_once_then_killed(machine: Machine, stopped: int) -> None:
    detector = machine.detector(LONG_S)
    machine.add(OTHER, "engine 1")
    assert machine.run(detector, LONG_S) == []
    machine.threads(stopped, stopped, state=STOPPED)
    (line,) = machine.run(detector, LONG_S - 2 * POLL_S)
    assert line.startswith(f"engine 0 (process {ENGINE} on {os.uname().nodename})")
    assert f"for {WARN_S:g} s" in line and (f"process {WORKER}" in line) == (stopped == WORKER)
    assert machine.killed == []
    (line,) = machine.run(detector, 2 * POLL_S)
    assert "100 s" in line and machine.killed == [ENGINE, WORKER]
    assert machine.poll(detector).actors == {"engine 1": OTHER}


def test_resumed_process_starts_over(machine: Machine) -> None:
    detector = machine.detector(LONG_S)
    for _ in range(2):
        machine.threads(ENGINE, ENGINE, state=STOPPED)
        assert len(machine.run(detector, LONG_S - POLL_S)) == 1
        machine.threads(ENGINE, ENGINE)
        assert machine.run(detector, POLL_S) == [] == machine.killed


def test_time_without_polls_does_not_count(machine: Machine) -> None:
    detector = machine.detector(LONG_S)
    machine.threads(ENGINE, ENGINE, state=STOPPED)
    for seconds in [3600.0] * 9 + [0.001] * 200:
        assert machine.poll(detector, seconds).messages == ()
    assert machine.killed == []


def test_zero_timeout_only_warns(machine: Machine) -> None:
    detector = machine.detector(0.0, raylet=RAYLET)
    for pid in (ENGINE, RAYLET):
        machine.threads(pid, pid, state=STOPPED)
    assert len(machine.run(detector, 3 * IDLE_S)) == 2
    assert machine.killed == [] and not machine.poll(detector).ray_failure


@pytest.mark.parametrize("tid", [ENGINE, 70])
@pytest.mark.parametrize(("state", "tracer"), [("t (tracing stop)", 5), ("S (sleeping)", 5)])
def test_debugged_process_is_left_alone(
    machine: Machine, tid: int, state: str, tracer: int
) -> None:
    detector = machine.detector(LONG_S)
    machine.threads(ENGINE, 70)
    for _ in range(2):
        for _ in range(round((LONG_S - 2) / POLL_S)):  # the count then starts over
            machine.poll(detector)
        machine.threads(ENGINE, tid, state=state, tracer=tracer)
        for _ in range(round(2 * LONG_S / POLL_S)):
            machine.poll(detector)
        assert machine.killed == []
        machine.threads(ENGINE, ENGINE, 70, switches="2")


def test_process_without_running_threads_is_killed(machine: Machine) -> None:
    detector, many = machine.detector(5.0), range(1000, 1050)
    for turn in range(30):
        machine.threads(ENGINE, ENGINE, *many[:turn], switches=str(turn))
        machine.poll(detector)
    machine.threads(ENGINE, many[7], switches="the last")
    polls = 2 + round(IDLE_S / POLL_S)  # it may have run in the first two
    warning, kill = [m for _ in range(polls) for m in machine.poll(detector).messages]
    assert f"for {WARN_S:g} s" in warning and f"for {IDLE_S:g} s" in kill
    assert machine.killed == [ENGINE, WORKER]


@pytest.mark.parametrize("counted", [True, False])
def test_one_running_thread_is_enough(machine: Machine, counted: bool) -> None:
    """Without counters in the kernel, no process counts as idle."""
    machine.threads(ENGINE, ENGINE, switches="1" if counted else "")
    detector = machine.detector(5.0)
    for turn in range(3 * round(IDLE_S / POLL_S)):
        if counted:
            machine.threads(ENGINE, 1000 + turn % 2, switches=str(turn))
        assert not machine.poll(detector).messages


def test_processes_omitted_by_the_kernel_stay_known(machine: Machine) -> None:
    detector = machine.detector(LONG_S)
    assert machine.poll(detector).actors == {"engine 0": ENGINE}
    machine.hide_children(RAYLET)
    machine.hide_children(ENGINE)
    assert machine.poll(detector).actors == {"engine 0": ENGINE}
    machine.threads(WORKER, WORKER, state=STOPPED)
    assert len(machine.run(detector, 30)) == 1
    machine.remove(ENGINE)
    assert machine.poll(detector).actors == {}
    machine.add(ENGINE, "engine 1", born=2)
    assert machine.poll(detector).actors == {"engine 1": ENGINE}
    machine.hide_children(RAYLET)
    machine.add(ENGINE, born=3, parent=0)  # another process with the same id
    assert machine.poll(detector).actors == {}


def test_other_runs_are_left_alone(machine: Machine) -> None:
    machine.add(OTHER, "engine 0", start="another")
    machine.add(10, "engine 0", start="another", parent=ENGINE)  # a run inside this run
    for pid in (OTHER, 10):
        machine.threads(pid, pid, state=STOPPED)
    detector = machine.detector(LONG_S)
    assert machine.run(detector, 2 * LONG_S) == [] == machine.killed
    assert machine.poll(detector).actors == {"engine 0": ENGINE}


def test_name_may_be_set_later(machine: Machine) -> None:
    machine.add(OTHER)
    detector = machine.detector(LONG_S)
    assert OTHER not in machine.poll(detector).actors.values()
    machine.mark(OTHER, "late")
    assert machine.poll(detector).actors["late"] == OTHER


def test_hung_ray_process_is_a_failure(machine: Machine) -> None:
    detector = machine.detector(LONG_S, raylet=RAYLET)
    assert not machine.poll(detector).ray_failure
    machine.threads(RAYLET, RAYLET, state=STOPPED)
    assert len(machine.run(detector, RAY_HANG_S - POLL_S)) == 1
    assert not detector.poll().ray_failure
    health = machine.poll(detector)
    assert f"raylet (process {RAYLET}" in health.ray_failure
    assert health.actors == {"engine 0": ENGINE} and machine.killed == []
    machine.remove(RAYLET)
    assert machine.poll(detector).ray_failure
    assert machine.killed == [ENGINE, WORKER]


Begin = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Start real processes with an actor's name."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(command: str, name: str, start: str = START) -> subprocess.Popen[bytes]:
        environment = {**os.environ, NAME: f"{start}/{name}"}
        begun.append(subprocess.Popen(["sh", "-c", command], env=environment, stdin=-1))
        return begun[-1]

    yield start
    for process in begun:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children():
                child.kill()
        process.kill()
        process.wait(timeout=PATIENCE_S)
        assert process.stdin
        process.stdin.close()


@pytest.mark.e2e
def test_real_processes(begin: Begin) -> None:
    """The idle process is detected only on kernels that count context switches."""
    stopped, idle = begin("sleep 600 & wait", "stopped"), begin("exec sleep 600", "idle")
    busy, now = begin("while read x; do :; done", "busy"), 0.0
    (child,) = wait_for(psutil.Process(stopped.pid).children)
    wait_for(lambda: psutil.Process(idle.pid).name() == "sleep")
    wait_for(lambda: psutil.Process(idle.pid).status() == psutil.STATUS_SLEEPING)
    stopped.send_signal(signal.SIGSTOP)
    wait_for(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED)
    status = Path(f"/proc/{busy.pid}/status")

    def switches() -> str:
        return status.read_text().partition("voluntary_ctxt_switches")[2]

    counted = bool(switches())
    detector = HangDetector(os.getpid(), {}, start=START, hang_timeout_s=5.0, clock=lambda: now)
    messages: list[str] = []
    assert detector.poll().actors == {"stopped": stopped.pid, "idle": idle.pid, "busy": busy.pid}
    while now < 2 * IDLE_S:
        before = switches()
        assert busy.stdin
        busy.stdin.write(b"work\n")
        busy.stdin.flush()
        wait_for(lambda before=before: switches() != before or not counted)
        now += 2 * POLL_S
        messages += detector.poll().messages
    assert "stopped" in messages[0] and len(messages) == 1 + 2 * counted
    assert stopped.wait(PATIENCE_S) == -signal.SIGKILL
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert busy.poll() is None and detector.poll().actors["busy"] == busy.pid
    if counted:
        assert idle.wait(PATIENCE_S) == -signal.SIGKILL


@pytest.mark.e2e
def test_kill_all_spares_other_runs(begin: Begin) -> None:
    ours = begin("sleep 1000 & wait", "engine 0")
    others = begin("sleep 1000 & wait", "engine 0", start="other")
    children = wait_for(psutil.Process(ours.pid).children)
    wait_for(psutil.Process(others.pid).children)
    HangDetector(os.getpid(), {}, start=START, hang_timeout_s=LONG_S).kill_all()
    assert ours.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not any(process.is_running() for process in children) and others.poll() is None


@pytest.mark.e2e
def test_frozen_actor_dies_with_its_raylet(begin: Begin) -> None:
    raylet = begin("sleep 1000 & wait", "engine 0")
    (actor,) = wait_for(psutil.Process(raylet.pid).children)
    ray = {"Ray's node": raylet.pid}
    detector = HangDetector(raylet.pid, ray, start=START, hang_timeout_s=LONG_S)
    assert wait_for(lambda: detector.poll().actors) == {"engine 0": actor.pid}
    actor.suspend()
    raylet.kill()
    assert wait_for(lambda: detector.poll().ray_failure)
    wait_for(lambda: not actor.is_running() or actor.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("content", "cores"),
    [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None), ("", None)],
)
def test_container_quota_limits_cores(tmp_path: Path, content: str, cores: int | None) -> None:
    quota = tmp_path / "cpu.max"
    unlimited = available_cores(quota)
    quota.write_text(content)
    assert available_cores(quota) == (cores or unlimited)
