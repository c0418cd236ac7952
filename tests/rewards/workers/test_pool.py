"""A verifier that hangs or dies costs its own answer and nothing else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from keel.rewards.custom import TextTrajectory, prompt_fields
from keel.rewards.workers.pool import Verdict, WorkerPool
from keel.rl.types import Prompt

SUM = {"kind": "answer", "answer": "3", "match": "exact"}
ROOT = {"kind": "answer", "answer": "\\sqrt{2}", "match": "math"}
HANGS = (
    "\\boxed{9^{9^{9^{9}}}}"  # sympy sets out to write this number down, deaf to signal handlers
)
FACTORS = {
    "kind": "reasoning_gym",
    "task": "prime_factorization",
    "entry": {"answer": "2 × 3", "metadata": {}},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(1, deadline_s=0.5)
    yield pool
    pool.close()


def verify(pool: WorkerPool, spec: dict[str, object], *answers: str) -> list[Verdict]:
    return pool.submit(spec, answers).result(60)


def test_verdicts_come_in_the_order_of_the_answers(pool: WorkerPool) -> None:
    verdicts = verify(pool, SUM, "3", "4", "3", "", "\ud800")
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert verify(pool, SUM) == []


def test_a_hanging_verifier_costs_its_own_answer(pool: WorkerPool) -> None:
    started = time.monotonic()
    right, hung, wrong, again = verify(pool, ROOT, "\\sqrt{2}", HANGS, "2", HANGS)
    assert (right, wrong) == (Verdict(1.0), Verdict(0.0))
    assert hung == again == Verdict(0.0, "verifier ran past its deadline of 0.5 s")
    assert time.monotonic() - started < 30  # once a distinct answer; the rest is starting anew
    assert verify(pool, SUM, "3") == [Verdict(1.0)]


def test_a_worker_that_dies_is_replaced(pool: WorkerPool) -> None:
    process = pool._workers[0]._process
    assert process is not None
    future = pool.submit(ROOT, [HANGS, "\\sqrt{2}"])
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    verdicts = future.result(60)
    assert verdicts[1] == Verdict(1.0)
    assert verify(pool, SUM, "3") == [Verdict(1.0)]


def test_a_spec_that_no_rule_reads_is_an_error_and_not_a_verdict(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="kind 'magic'"):
        verify(pool, {"kind": "magic"}, "3")
    assert verify(pool, SUM, "3") == [Verdict(1.0)]


def test_closing_ends_what_is_under_way() -> None:
    pool = WorkerPool(1, deadline_s=60.0)
    process = pool._workers[0]._process
    assert process is not None
    future = pool.submit(ROOT, [HANGS])
    time.sleep(0.1)
    pool.close()
    assert process.poll() is not None
    with pytest.raises(RuntimeError, match=r"closed|SIGKILL"):
        future.result(10)


LEAVES = """
import subprocess, time

def starts(prompt, trajectory):
    subprocess.Popen(["sleep", "1000.375"], start_new_session=True)
    time.sleep(60)
"""


def sleepers() -> list[Path]:
    found: list[Path] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "cmdline").read_bytes() == b"sleep\x001000.375\x00":
                found.append(folder)
    return found


def test_closing_ends_what_a_worker_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever session it went to."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    prompt = Prompt(prompt_id="p", domain="d", messages=({"role": "user", "content": "?"},))
    spec = {"kind": "function", "name": "leaves.starts", "prompt": prompt_fields(prompt)}
    said = TextTrajectory(messages=(), finish_reason="stop", sampled_tokens=1)
    pool = WorkerPool(1, deadline_s=60.0)
    future = pool.submit(spec, [said.dumps()])
    until = time.monotonic() + 30
    while not sleepers() and not future.done() and time.monotonic() < until:
        time.sleep(0.01)
    assert sleepers(), future
    pool.close()
    until = time.monotonic() + 5
    while sleepers() and time.monotonic() < until:
        time.sleep(0.01)
    assert not sleepers()


def test_without_workers_completions_are_verified_in_process() -> None:
    pool = WorkerPool(0, deadline_s=1.0)
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
        WorkerPool(-1, deadline_s=1.0)
    with pytest.raises(ValueError, match=r"deadline_s = 0\.0"):
        WorkerPool(1, deadline_s=0.0)
