"""A verifier that hangs or dies costs its own answer and nothing else."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from keel.rewards.custom import TextTrajectory, prompt_fields
from keel.rewards.workers import pool as pool_module
from keel.rewards.workers.pool import Verdict, WorkerPool
from keel.rewards.workers.worker import PREEMPTION
from keel.rl.types import Prompt
from tests.waiting import PATIENCE_S, wait_for, within_some

pytestmark = pytest.mark.e2e

SUM = {"kind": "answer", "answer": "3", "match": "exact"}
FACTORS = {
    "kind": "reasoning_gym",
    "task": "prime_factorization",
    "entry": {"answer": "2 × 3", "metadata": {}},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(1, timeout_s=PATIENCE_S)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def first_calls_are_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.rewards.workers.pool.FIRST_S", 0.0)


class Waits:
    """A reward function that starts a process of its own and waits, where it is asked to."""

    def __init__(self, folder: Path) -> None:
        self._mark = f"1000.{os.getpid()}"  # nobody else sleeps for exactly so long
        (folder / "waits.py").write_text(
            "import subprocess, time\n"
            "def score(prompt, trajectory):\n"
            "    if trajectory.sampled_tokens == 1:\n"
            f"        subprocess.Popen(['sleep', '{self._mark}'], start_new_session=True)\n"
            "        time.sleep(1000)\n"
            "    return 1.0\n"
        )
        prompt = Prompt(prompt_id="p", domain="d", messages=({"role": "user", "content": "?"},))
        self.spec = {"kind": "function", "name": "waits.score", "prompt": prompt_fields(prompt)}
        self.hangs, self.right = (
            TextTrajectory(messages=(), finish_reason="stop", sampled_tokens=count).dumps()
            for count in (1, 2)
        )

    def sleepers(self) -> list[int]:
        wanted, found = f"sleep\0{self._mark}\0".encode(), list[int]()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (folder / "cmdline").read_bytes() == wanted:
                    found.append(int(folder.name))
        return found

    def end(self) -> None:
        for pid in self.sleepers():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Waits:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Waits(tmp_path)


def verify(pool: WorkerPool, spec: dict[str, object], *answers: str) -> list[Verdict]:
    return pool.submit(spec, answers).result(PATIENCE_S)


def test_verdicts_come_in_the_order_of_the_answers(pool: WorkerPool) -> None:
    verdicts = verify(pool, SUM, "3", "4", "3", "", "\ud800")
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert verify(pool, SUM) == []


def test_a_hanging_verifier_costs_its_own_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that sets out to write a long number down, deaf to signal handlers."""
    (tmp_path / "deaf.py").write_text(
        "def score(prompt, trajectory):\n"
        "    number = trajectory.sampled_tokens\n"
        "    return float(number == 2 if number < 9 else number**number**number > 0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    prompt = Prompt(prompt_id="p", domain="d", messages=({"role": "user", "content": "?"},))
    deaf = {"kind": "function", "name": "deaf.score", "prompt": prompt_fields(prompt)}
    two, nine, three = (
        TextTrajectory(messages=(), finish_reason="stop", sampled_tokens=count).dumps()
        for count in (2, 9, 3)
    )
    started: list[int] = []
    start = pool_module._Worker.start
    monkeypatch.setattr(
        pool_module._Worker, "start", lambda worker: (started.append(1), start(worker))
    )

    def costs(limit_s: float) -> None:
        started.clear()
        pool = WorkerPool(1, timeout_s=limit_s)
        try:
            right, hung, wrong, again = verify(pool, deaf, two, nine, three, nine)
            assert (right, wrong) == (Verdict(1.0), Verdict(0.0))
            assert hung == again == Verdict(0.0, f"verifier ran past its deadline of {limit_s:g} s")
            assert len(started) == 2, "once a distinct answer"
            assert verify(pool, SUM, "3") == [Verdict(1.0)]
        finally:
            pool.close()

    within_some(costs, (1.0, 10.0, 60.0))


def test_a_worker_that_dies_is_replaced_and_a_schedulers_signal_ends_none(waits: Waits) -> None:
    pool = WorkerPool(1, timeout_s=PATIENCE_S)
    try:
        process = pool._workers[0]._process
        assert process is not None
        for number in PREEMPTION:  # before it has begun
            os.kill(process.pid, number)
        future = pool.submit(waits.spec, [waits.hangs, waits.right])
        wait_for(waits.sleepers)
        for number in (signal.SIGINT, *PREEMPTION):
            os.kill(process.pid, number)
        os.kill(process.pid, signal.SIGKILL)
        first, second = future.result(PATIENCE_S)
        assert (first, second) == (Verdict(0.0, "verifier ended with SIGKILL"), Verdict(1.0))
        assert verify(pool, SUM, "3") == [Verdict(1.0)]
    finally:
        pool.close()
        waits.end()


def test_a_worker_that_stands_still_is_replaced_and_costs_nothing(
    waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has begun, and in the middle of a completion."""
    monkeypatch.setattr(pool_module, "LOOK_S", 0.02)
    pool = WorkerPool(1, timeout_s=PATIENCE_S)
    try:
        first = pool._workers[0]._process
        assert first is not None
        os.kill(first.pid, signal.SIGSTOP)
        hanging = pool.submit(waits.spec, [waits.hangs])
        wait_for(waits.sleepers)
        second = pool._workers[0]._process
        assert second is not None and second.pid != first.pid
        os.kill(second.pid, signal.SIGSTOP)
        wait_for(lambda: pool._workers[0]._process not in (None, second))
        assert not hanging.done(), "it is given to another"
    finally:
        pool.close()
        waits.end()


def test_a_spec_that_no_rule_reads_is_an_error_and_not_a_verdict(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="kind 'magic'"):
        verify(pool, {"kind": "magic"}, "3")
    assert verify(pool, SUM, "3") == [Verdict(1.0)]


def test_closing_ends_what_is_under_way_and_what_a_worker_has_started(waits: Waits) -> None:
    """Whatever session it went to."""
    pool = WorkerPool(1, timeout_s=PATIENCE_S)
    process = pool._workers[0]._process
    assert process is not None
    future = pool.submit(waits.spec, [waits.hangs, waits.right])
    wait_for(waits.sleepers)
    pool.close()
    assert process.poll() is not None
    with pytest.raises(RuntimeError, match="closed"):
        future.result(PATIENCE_S)
    wait_for(lambda: not waits.sleepers())


def test_functions_may_take_memory_that_rules_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "takes.py").write_text(
        "import mmap\nKEPT = []\n"
        "def room(prompt, trajectory):\n"
        "    KEPT.append(mmap.mmap(-1, 12 << 30, flags=0x4022))  # reserves none\n"
        "    return 1.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    prompt = Prompt(prompt_id="p", domain="d", messages=({"role": "user", "content": "?"},))
    takes = {"kind": "function", "name": "takes.room", "prompt": prompt_fields(prompt)}
    one = TextTrajectory(messages=(), finish_reason="stop", sampled_tokens=1).dumps()
    pool = WorkerPool(1, timeout_s=PATIENCE_S)
    try:
        (process,) = [worker._process for worker in pool._workers]
        assert process is not None

        def most() -> str:
            limits = Path(f"/proc/{process.pid}/limits").read_text()
            (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
            return line.split()[3]

        assert verify(pool, SUM, "3") == [Verdict(1.0)]
        assert 8 << 30 < int(most()) < 9 << 30
        assert verify(pool, takes, one) == [Verdict(1.0)]
        assert verify(pool, SUM, "3", "4") == [Verdict(1.0), Verdict(0.0)]
        assert 20 << 30 < int(most()) < 21 << 30, "as much again beyond what the function keeps"
    finally:
        pool.close()


def test_without_workers_completions_are_verified_in_process() -> None:
    pool = WorkerPool(0, timeout_s=1.0)
    assert verify(pool, SUM, "3", "4") == [Verdict(1.0), Verdict(0.0)]
    right, wrong = verify(pool, FACTORS, "3 × 2", "three")
    assert right == Verdict(1.0)
    assert wrong.score == 0.0
    assert wrong.error.startswith("ValueError: invalid literal")
    with pytest.raises(ValueError, match="kind 'magic'"):
        verify(pool, {"kind": "magic"}, "3")
    pool.close()


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="workers = -1"):
        WorkerPool(-1, timeout_s=1.0)
    with pytest.raises(ValueError, match=r"timeout_s = 0\.0"):
        WorkerPool(1, timeout_s=0.0)
