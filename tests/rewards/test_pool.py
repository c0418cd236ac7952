"""A verifier that hangs or dies costs its own answer and nothing else."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from keel.rewards import pool as pool_module
from keel.rewards.custom import TextTrajectory, prompt_fields
from keel.rewards.pool import VerifierScore, WorkerPool
from keel.rl.supervisor import PREEMPTION
from keel.rl.types import Prompt
from tests.rewards import functions
from tests.waiting import PATIENCE_S, wait_for, within_some

pytestmark = pytest.mark.e2e

SUM = {"kind": "answer", "answer": "3", "match": "exact"}
MARK = f"1000.{os.getpid()}"  # no other process sleeps for this time


@pytest.fixture(scope="module", autouse=True)
def module() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEEL_TEST_MARK", MARK)
        patch.setattr(pool_module, "_FIRST_CALL_S", 0.0)
        yield


@pytest.fixture(autouse=True)
def no_sleepers() -> Iterator[None]:
    yield
    for pid in sleepers():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def pool(module: None) -> Iterator[WorkerPool]:
    pool = WorkerPool(1, timeout_s=PATIENCE_S)
    yield pool
    pool.close()


def function(name: str) -> dict[str, object]:
    prompt = Prompt(prompt_id="p", domain="d", messages=({"role": "user", "content": "?"},))
    return {"kind": "function", "name": f"{functions.NAME}.{name}", "prompt": prompt_fields(prompt)}


def tokens(count: int) -> str:
    return TextTrajectory(messages=(), finish_reason="stop", sampled_tokens=count).dumps()


HANGS, RIGHT = tokens(1), tokens(2)


def sleepers() -> list[int]:
    pids: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "cmdline").read_bytes() == f"sleep\0{MARK}\0".encode():
                pids.append(int(folder.name))
    return pids


def verify(pool: WorkerPool, spec: dict[str, object], *answers: str) -> list[VerifierScore]:
    return pool.submit(spec, answers).result(PATIENCE_S)


def test_scores_keep_the_order_of_answers(pool: WorkerPool) -> None:
    scores = verify(pool, SUM, "3", "4", "3", "", "\ud800")
    assert [score.score for score in scores] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert verify(pool, SUM) == []


def test_a_bad_spec_is_an_error(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="magic"):
        verify(pool, {"kind": "magic"}, "3")
    assert verify(pool, SUM, "3") == [VerifierScore(1.0)]


def test_a_hanging_verifier_costs_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []
    start = pool_module._Worker.start
    monkeypatch.setattr(
        pool_module._Worker, "start", lambda worker: (starts.append(1), start(worker))
    )

    def check(limit_s: float) -> None:
        starts.clear()
        pool = WorkerPool(1, timeout_s=limit_s)
        try:
            answers = (tokens(2), tokens(9), tokens(3), tokens(9))
            right, hung, wrong, repeated = verify(pool, function("deaf"), *answers)
            assert (right, wrong) == (VerifierScore(1.0), VerifierScore(0.0))
            assert hung == repeated and hung.score == 0 and f"{limit_s:g} s" in hung.error
            assert len(starts) == 2, "once per distinct answer"
            assert verify(pool, SUM, "3") == [VerifierScore(1.0)]
        finally:
            pool.close()

    within_some(check, (1.0, 10.0, 60.0))


def test_a_first_call_gets_more_time_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_FIRST_CALL_S", 0.5)
    pool = WorkerPool(1, timeout_s=0.25)
    try:
        hung = verify(pool, function("deaf"), *map(tokens, (9, 10, 11)))
        assert [score.error.split()[-2] for score in hung] == ["0.5", "0.25", "0.25"]
    finally:
        pool.close()


def test_a_killed_worker_is_replaced() -> None:
    pool = WorkerPool(1, timeout_s=PATIENCE_S)
    try:
        process = pool._workers[0]._process
        for number in PREEMPTION:  # before its handlers are installed
            os.kill(process.pid, number)
        future = pool.submit(function("wait"), [HANGS, RIGHT])
        wait_for(sleepers)
        for number in (signal.SIGINT, *PREEMPTION):
            os.kill(process.pid, number)
        os.kill(process.pid, signal.SIGKILL)
        first, second = future.result(PATIENCE_S)
        assert (first.score, second) == (0.0, VerifierScore(1.0)) and "SIGKILL" in first.error
        assert verify(pool, SUM, "3") == [VerifierScore(1.0)]
    finally:
        pool.close()


def test_a_stopped_worker_is_replaced_before_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_POLL_S", 0.1)
    monkeypatch.setattr(pool_module, "_START_TIMEOUT_S", 2 * PATIENCE_S)
    pool = WorkerPool(1, timeout_s=2 * PATIENCE_S)
    try:
        assert verify(pool, SUM, "3") == [VerifierScore(1.0)]
        idle = pool._workers[0]._process
        idle.send_signal(signal.SIGSTOP)
        future = pool.submit(function("wait"), [HANGS, RIGHT])
        wait_for(sleepers)
        scoring = pool._workers[0]._process
        scoring.send_signal(signal.SIGSTOP)
        wait_for(lambda: scoring.poll() is not None)
        wait_for(sleepers)
        again = pool._workers[0]._process
        again.kill()
        first, second = future.result(PATIENCE_S)
        assert len({idle.pid, scoring.pid, again.pid}) == 3
        assert "SIGKILL" in first.error, "a stopped worker's completion is tried again"
        assert second == VerifierScore(1.0)
    finally:
        pool.close()


def test_closing_ends_workers_and_their_descendants() -> None:
    pool = WorkerPool(1, timeout_s=PATIENCE_S)
    process = pool._workers[0]._process
    future = pool.submit(function("wait"), [HANGS, RIGHT])
    wait_for(sleepers)
    pool.close()
    assert process.poll() is not None
    with pytest.raises(RuntimeError, match="closed"):
        future.result(PATIENCE_S)
    wait_for(lambda: not sleepers())
