"""A frozen trainer rank is replaced; a frozen raylet ends the run (engines: test_command.py)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from keel.trainer.run.journal import EVENTS
from tests.e2e.test_command import DEADLINE_S, Running, metrics, small, words_of

pytestmark = pytest.mark.e2e


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Running]:
    knobs = small(tmp_path / "run", tmp_path / "cache", steps=500)
    knobs += ["model.tiny.cold_start.steps=0", "algorithm.max_lag=1"]
    knobs += ["run.checkpoint_every=2", "run.hang_timeout_s=5"]
    running = Running(knobs, tmp_path / "log.txt")
    yield running
    running.kill()


def find(run: Running, matches: Callable[[str], bool]) -> psutil.Process:
    return next(process for process in run.below() if matches(words_of(process)))


def test_frozen_rank_is_replaced_and_frozen_raylet_ends(run: Running, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run.wait(lambda: len(metrics(folder)) >= 4, "three steps")
    rank = find(run, lambda words: words.startswith("ray::TrainerWorker"))
    rank.send_signal(signal.SIGSTOP)
    events = folder / EVENTS
    run.wait(lambda: events.exists() and '"kind": "resume"' in events.read_text(), "a restart")
    since = metrics(folder)[-1]["step"]
    run.wait(lambda: metrics(folder)[-1]["step"] > since, "a step after it")
    below = run.below()
    raylet = find(run, lambda words: "/raylet" in words.split(" ")[0])
    raylet.send_signal(signal.SIGSTOP)
    output = run.finish(1)
    assert f"trainer rank 0 (process {rank.pid} on " in output
    assert f"(raylet) (process {raylet.pid} " in output
    assert "Traceback" not in output and "state-dump" not in output
    _, alive = psutil.wait_procs(below, timeout=DEADLINE_S)
    assert not alive
    steps = [line["step"] for line in metrics(folder)]
    assert steps == list(range(len(steps))), "each is recorded once"
