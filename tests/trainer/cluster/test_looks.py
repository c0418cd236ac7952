"""What stands still is ended, and nothing else: with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from keel.model.ray_calls import NAME
from keel.trainer.cluster import looks
from keel.trainer.cluster.looks import STOPPED, Looker, Sight
from tests.waiting import PATIENCE_S, wait_for

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A process, of that name if it has one. It only sleeps, which is to be no fault here."""
    monkeypatch.setattr(looks, "STILL", 10**6)
    begun: list[subprocess.Popen[bytes]] = []

    def begin(command: str, name: str = "") -> subprocess.Popen[bytes]:
        named = {NAME: name} if name else {}
        environment = {key: value for key, value in os.environ.items() if key != NAME} | named
        begun.append(subprocess.Popen(["sh", "-c", command], env=environment, stdin=-1))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.wait()
        assert process.stdin
        process.stdin.close()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    state = psutil.Process(pid)
    wait_for(lambda: state.status() == psutil.STATUS_STOPPED)


def here() -> Looker:
    return Looker(os.getpid(), {})


def several(looker: Looker, times: int) -> list[Sight]:
    return [looker.look() for _ in range(times)]


def test_a_stopped_process_is_ended_after_some_looks_with_all_below_it(start: Start) -> None:
    engine, other = start("sleep 600 & wait", "engine 0"), start("exec sleep 600", "engine 1")
    stranger, looker = start("exec sleep 600"), here()
    (below,) = wait_for(psutil.Process(engine.pid).children)
    stop(engine.pid)
    stop(stranger.pid)
    sights = several(looker, STOPPED)
    assert not any(sight.ended for sight in sights[:-1]), "a look or two may find it so"
    (line,) = sights[-1].ended
    assert line.startswith(f"engine 0 (process {engine.pid} on {sights[0].host}) has been stopped")
    assert engine.wait(PATIENCE_S) == -signal.SIGKILL
    wait_for(lambda: not below.is_running() or below.status() == psutil.STATUS_ZOMBIE)
    assert looker.look().here == {"engine 1": other.pid}
    assert stranger.poll() is None, "not of this run"


def test_an_actor_waits_for_what_it_has_started(start: Start) -> None:
    """An engine's workers, say, which hold the GPUs."""
    engine, looker = start("sleep 600 & wait", "engine 0"), here()
    (below,) = wait_for(psutil.Process(engine.pid).children)
    stop(below.pid)
    (line,) = several(looker, STOPPED)[-1].ended
    assert f"waits for its process {below.pid}, which has been stopped" in line
    assert engine.wait(PATIENCE_S) == -signal.SIGKILL


def test_one_that_goes_on_in_time_is_let_be(start: Start) -> None:
    """As all processes of a run do that was itself stopped, and continued."""
    engine, looker = start("exec sleep 600", "engine 0"), here()
    for _ in range(2):
        stop(engine.pid)
        assert not any(sight.ended for sight in several(looker, STOPPED - 1))
        engine.send_signal(signal.SIGCONT)
        wait_for(lambda: psutil.Process(engine.pid).status() != psutil.STATUS_STOPPED)
        assert not looker.look().ended
    assert engine.poll() is None


def test_one_that_no_processor_runs_is_ended_and_one_that_works_is_not(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "STILL", 3)
    frozen, busy = (
        start("exec sleep 600", "engine 0"),
        start("while read x; do :; done", "engine 1"),
    )
    looker, status = here(), Path(f"/proc/{busy.pid}/status")

    def switches() -> str:
        return status.read_text().partition("voluntary_ctxt_switches")[2]

    wait_for(lambda: psutil.Process(frozen.pid).name() == "sleep")
    wait_for(lambda: psutil.Process(frozen.pid).status() == psutil.STATUS_SLEEPING)
    ended: list[str] = []
    for _ in range(3 * 3):
        ended += looker.look().ended
        before = switches()
        assert busy.stdin
        busy.stdin.write(b"work\n")
        busy.stdin.flush()
        wait_for(lambda before=before: switches() != before)
    (line,) = ended
    assert line.startswith("engine 0") and "has not run at all" in line
    assert frozen.wait(PATIENCE_S) == -signal.SIGKILL and busy.poll() is None


def test_where_the_kernel_counts_nothing_nobody_is_still(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "STILL", 3)
    monkeypatch.setattr(looks, "COUNTED", "no_such_line")
    engine = start("exec sleep 600", "engine 0")
    looker = here()
    wait_for(lambda: looker.look().here)
    assert not any(sight.ended for sight in several(looker, 6)) and engine.poll() is None


def test_a_name_may_come_later_than_its_process(start: Start) -> None:
    """Ray starts a process, which then becomes what it is to be."""
    process, looker = start(f"read go; {NAME}=late exec sleep 600"), here()
    assert looker.look().here == {}
    assert process.stdin
    process.stdin.write(b"go\n")
    process.stdin.flush()
    assert wait_for(lambda: looker.look().here) == {"late": process.pid}


@pytest.mark.parametrize(("number", "how"), [(signal.SIGSTOP, "stopped"), (signal.SIGKILL, "gone")])
def test_rays_own_processes_are_not_ended_but_told_of(
    start: Start, number: signal.Signals, how: str
) -> None:
    raylet = start("exec sleep 600")
    looker = Looker(os.getpid(), {"the raylet": raylet.pid})
    assert not looker.look().lost
    raylet.send_signal(number)
    stopped = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    wait_for(lambda: psutil.Process(raylet.pid).status() in stopped)
    lost = several(looker, STOPPED)[-1].lost
    assert lost.startswith(f"the raylet (process {raylet.pid} on ") and how in lost
    assert number == signal.SIGKILL or raylet.poll() is None
