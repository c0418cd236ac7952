"""What stands still is spoken of, and ended when that goes on; nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from keel.model.ray_timeouts import NAME
from keel.trainer.placement.hang_detector import IDLE_S, POLL_S, RAY_HANG_S, WARN_S, HangDetector
from tests.trainer.placement.fake_proc import RAYLET, START, Machine
from tests.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.e2e

ENGINE, WORKER, OTHER = 7, 8, 9
STOPPED = "T (stopped)"
LONG_S = 100.0


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One with an engine, which has started a worker."""
    machine = Machine(tmp_path, monkeypatch)
    machine.add(ENGINE, "engine 0")
    machine.add(WORKER, "engine 0", below=ENGINE)
    return machine


def through(machine: Machine, looker: HangDetector, seconds: float) -> list[str]:
    """What is said in so many seconds, in which every thread that is not stopped gets on."""
    said: list[str] = []
    for turn in range(round(seconds / POLL_S)):
        for pid in (RAYLET, ENGINE, OTHER):
            status = Path(psutil.PROCFS_PATH, f"{pid}/task/{pid}/status")
            if status.exists() and "(sleeping)" in status.read_text():
                machine.threads(pid, pid, at=f"{machine.now} {turn}")
        said += machine.poll(looker).messages
    return said


@pytest.mark.parametrize(
    ("stopped", "whose"), [(ENGINE, ""), (WORKER, f" waits for its process {WORKER}, which")]
)
def test_what_is_stopped_is_said_once_and_ended_with_all_below_it_only_when_its_time_is_over(
    machine: Machine, stopped: int, whose: str
) -> None:
    looker = machine.looker(LONG_S)
    machine.add(OTHER, "engine 1")
    assert through(machine, looker, LONG_S) == []
    machine.threads(stopped, stopped, state=STOPPED)
    (line,) = through(machine, looker, LONG_S - 2 * POLL_S)
    host = os.uname().nodename
    who = f"engine 0 (process {ENGINE} on {host}){whose} has been stopped (SIGSTOP) for "
    assert line == f"{who}{WARN_S:g} s. After 100 s it is ended (run.hang_timeout_s = 100)"
    assert machine.ended == []
    (line,) = through(machine, looker, 2 * POLL_S)
    assert line == f"{who}100 s, and was ended" and machine.ended == [ENGINE, WORKER]
    assert machine.poll(looker).actors == {"engine 1": OTHER}


def test_who_goes_on_in_time_is_let_be_and_begins_anew(machine: Machine) -> None:
    looker = machine.looker(LONG_S)
    for _ in range(2):
        machine.threads(ENGINE, ENGINE, state=STOPPED)
        assert len(through(machine, looker, LONG_S - POLL_S)) == 1
        machine.threads(ENGINE, ENGINE)
        assert through(machine, looker, POLL_S) == [] == machine.ended


def test_seconds_without_looks_and_looks_without_seconds_do_not_count(machine: Machine) -> None:
    """A machine that slept, or a driver that was stopped with its run; many looks at once, of a
    node that was slow to answer."""
    looker = machine.looker(LONG_S)
    machine.threads(ENGINE, ENGINE, state=STOPPED)
    for _ in range(9):
        assert machine.poll(looker, seconds=3600.0).messages == ()
    for _ in range(200):
        assert machine.poll(looker, seconds=0.001).messages == ()
    assert machine.ended == []


def test_zero_ends_nothing(machine: Machine) -> None:
    looker = machine.looker(0.0, **{"the raylet": RAYLET})
    for pid in (ENGINE, RAYLET):
        machine.threads(pid, pid, state=STOPPED)
    said = through(machine, looker, 3 * IDLE_S)
    assert [line.partition(". ")[2] for line in said] == [
        "It is left alone (run.hang_timeout_s = 0)",
        "It is left alone (run.hang_timeout_s = 0)",
    ]
    assert machine.ended == [] and not machine.poll(looker).ray_failure


@pytest.mark.parametrize("number", [ENGINE, 70])
@pytest.mark.parametrize(("state", "tracer"), [("t (tracing stop)", 5), ("S (sleeping)", 5)])
def test_one_in_a_debugger_is_meant_to_stand_still(
    machine: Machine, number: int, state: str, tracer: int
) -> None:
    """All of it, or one of its threads."""
    looker = machine.looker(LONG_S)
    machine.threads(ENGINE, 70)
    for _ in range(2):
        for _ in range(round((LONG_S - 2) / POLL_S)):  # which count from the start afterwards
            machine.poll(looker)
        machine.threads(ENGINE, number, state=state, tracer=tracer)
        for _ in range(round(2 * LONG_S / POLL_S)):
            machine.poll(looker)
        assert machine.ended == []
        machine.threads(ENGINE, ENGINE, 70, at="2")


def test_no_thread_of_many_gets_on(machine: Machine) -> None:
    """However many there are, and whichever of them got on before; at least `IDLE_S`."""
    looker, many = machine.looker(5.0), range(1000, 1050)
    for turn in range(30):
        machine.threads(ENGINE, ENGINE, *many[:turn], at=str(turn))
        machine.poll(looker)
    machine.threads(ENGINE, many[7], at="the last")
    looks = 2 + round(IDLE_S / POLL_S)  # in the first two they may have got on
    said = [line for _ in range(looks) for line in machine.poll(looker).messages]
    assert "has not run at all for 20 s. After 60 s it is ended (run.froz" in said[0]
    assert said[1].endswith("has not run at all for 60 s, and was ended") and len(said) == 2


def test_one_thread_that_gets_on_is_enough(machine: Machine) -> None:
    looker = machine.looker(5.0)
    for turn in range(3 * round(IDLE_S / POLL_S)):
        machine.threads(ENGINE, 1000 + turn % 2, at=str(turn))
        assert not machine.poll(looker).messages


def test_where_the_kernel_counts_nothing_nobody_is_still(machine: Machine) -> None:
    machine.threads(ENGINE, ENGINE, at="")
    looker = machine.looker(5.0)
    said = [machine.poll(looker).messages for _ in range(2 * round(IDLE_S / POLL_S))]
    assert not any(said)


def test_whom_the_kernel_leaves_out_is_here_until_it_is_gone(machine: Machine) -> None:
    looker = machine.looker(LONG_S)
    assert machine.poll(looker).actors == {"engine 0": ENGINE}
    machine.list_none_below(RAYLET)
    machine.list_none_below(ENGINE)
    assert machine.poll(looker).actors == {"engine 0": ENGINE}
    machine.threads(WORKER, WORKER, state=STOPPED)
    assert len(through(machine, looker, 30)) == 1, "the same holds of what an actor has started"
    machine.remove(ENGINE)
    assert machine.poll(looker).actors == {}
    machine.add(ENGINE, "engine 1", begun=2)
    assert machine.poll(looker).actors == {"engine 1": ENGINE}
    machine.list_none_below(RAYLET)
    machine.add(ENGINE, begun=3, below=0)  # another process of the same number
    assert machine.poll(looker).actors == {}


def test_other_runs_on_the_same_machine_are_none_of_ours(machine: Machine) -> None:
    """Whose driver has given its actors the same names; and a run inside of a run."""
    machine.add(OTHER, "engine 0", start="another")
    machine.add(10, "engine 0", start="another", below=ENGINE)
    for pid in (OTHER, 10):
        machine.threads(pid, pid, state=STOPPED)
    looker = machine.looker(LONG_S)
    assert through(machine, looker, 2 * LONG_S) == [] == machine.ended
    assert machine.poll(looker).actors == {"engine 0": ENGINE}


def test_a_name_may_come_later_than_its_process(machine: Machine) -> None:
    """Ray starts a process, which then becomes what it is to be."""
    machine.add(OTHER)
    looker = machine.looker(LONG_S)
    assert OTHER not in machine.poll(looker).actors.values()
    machine.mark(OTHER, "late")
    assert machine.poll(looker).actors["late"] == OTHER


def test_rays_own_processes_are_not_ended_but_told_of(machine: Machine) -> None:
    looker = machine.looker(LONG_S, **{"the raylet": RAYLET})
    assert not machine.poll(looker).ray_failure
    machine.threads(RAYLET, RAYLET, state=STOPPED)
    (line,) = through(machine, looker, RAY_HANG_S - POLL_S)
    assert "After 60 s it is given up (run.hang_timeout_s = 100)" in line
    assert not looker.poll().ray_failure
    sight = machine.poll(looker)
    assert (
        sight.ray_failure.startswith(f"the raylet (process {RAYLET} on ")
        and "stopped" in sight.ray_failure
    )
    assert sight.actors == {"engine 0": ENGINE}, "it is no less here"
    machine.remove(RAYLET)
    assert machine.poll(looker).ray_failure.endswith(" is gone")
    assert machine.ended == [ENGINE, WORKER], "which nobody else would end, were they frozen"


Begin = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """A real process, of that name."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(command: str, name: str) -> subprocess.Popen[bytes]:
        mark = {NAME: f"{START}/{name}"}
        begun.append(subprocess.Popen(["sh", "-c", command], env=os.environ | mark, stdin=-1))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.wait(timeout=PATIENCE_S)
        assert process.stdin
        process.stdin.close()


def test_real_processes_stopped_still_and_at_work(begin: Begin) -> None:
    """The one that is still is found on kernels that count switches, as Linux does."""
    stopped, still = begin("sleep 600 & wait", "stopped"), begin("exec sleep 600", "still")
    busy, now = begin("while read x; do :; done", "busy"), 0.0
    (below,) = wait_for(psutil.Process(stopped.pid).children)
    wait_for(lambda: psutil.Process(still.pid).name() == "sleep")
    wait_for(lambda: psutil.Process(still.pid).status() == psutil.STATUS_SLEEPING)
    stopped.send_signal(signal.SIGSTOP)
    wait_for(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED)
    status = Path(f"/proc/{busy.pid}/status")

    def switches() -> str:
        return status.read_text().partition("voluntary_ctxt_switches")[2]

    counted = bool(switches())
    looker = HangDetector(os.getpid(), {}, start=START, hang_timeout_s=5.0, clock=lambda: now)
    said: list[str] = []
    assert looker.poll().actors == {"stopped": stopped.pid, "still": still.pid, "busy": busy.pid}
    while now < 2 * IDLE_S:
        before = switches()
        assert busy.stdin
        busy.stdin.write(b"work\n")
        busy.stdin.flush()
        wait_for(lambda before=before: switches() != before or not counted)
        now += 2 * POLL_S
        said += looker.poll().messages
    first, *more = said
    assert "stopped" in first and f"process {stopped.pid}" in first and first.endswith("was ended")
    assert stopped.wait(PATIENCE_S) == -signal.SIGKILL
    wait_for(lambda: not below.is_running() or below.status() == psutil.STATUS_ZOMBIE)
    assert busy.poll() is None and looker.poll().actors["busy"] == busy.pid
    assert len(more) == 2 * counted
    if more:
        assert f"still (process {still.pid}" in more[1] and more[1].endswith("60 s, and was ended")
        assert still.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_node_that_is_cut_off_ends_all_of_the_run_and_nothing_else() -> None:
    sleeps = ["sh", "-c", "sleep 1000 & wait"]
    ours = subprocess.Popen(sleeps, env={**os.environ, NAME: f"{START}/engine 0"})
    others = subprocess.Popen(sleeps, env={**os.environ, NAME: "other/engine 0"})
    try:
        below = wait_for(psutil.Process(ours.pid).children)
        wait_for(psutil.Process(others.pid).children)
        HangDetector(os.getpid(), {}, start=START, hang_timeout_s=LONG_S).kill_all()
        assert ours.wait(timeout=PATIENCE_S) == -signal.SIGKILL
        psutil.wait_procs(below, timeout=PATIENCE_S)
        assert not any(process.is_running() for process in below) and others.poll() is None
    finally:
        for process in (ours, others):
            if process.poll() is None:
                for each in (*psutil.Process(process.pid).children(), process):
                    each.kill()
            process.wait(timeout=PATIENCE_S)


def test_a_frozen_actor_does_not_outlive_its_raylet() -> None:
    # As Ray's, which gives up its raylet when it runs: this one does not.
    raylet = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & wait"], env={**os.environ, NAME: f"{START}/engine 0"}
    )
    (actor,) = wait_for(psutil.Process(raylet.pid).children)
    try:
        looker = HangDetector(
            raylet.pid, {"Ray's node": raylet.pid}, start=START, hang_timeout_s=LONG_S
        )
        assert wait_for(lambda: looker.poll().actors) == {"engine 0": actor.pid}
        actor.suspend()
        raylet.kill()
        assert "is gone" in wait_for(lambda: looker.poll().ray_failure)
        wait_for(lambda: not actor.is_running() or actor.status() == psutil.STATUS_ZOMBIE)
    finally:
        raylet.kill()
        if actor.is_running():
            actor.kill()
