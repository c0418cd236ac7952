"""Processes of a run that stand still: one that can be had again, and one without which nothing is.
A frozen engine: tests/e2e/test_command.py."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from keel.trainer.run.journal import EVENTS
from tests.e2e.test_command import DEADLINE_S, Running, metrics, small, wait_until, words_of

pytestmark = pytest.mark.e2e


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    knobs = small(tmp_path / "run", tmp_path_factory.mktemp("cache"), steps=500)
    more = [
        "model.tiny.cold_start.steps=0",
        "algorithm.max_lag=1",
        "run.checkpoint_every=2",
        "run.hang_timeout_s=5",
    ]
    running = Running([*knobs, *more], tmp_path / "log.txt")
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait(timeout=DEADLINE_S)


def the(run: Running, named: Callable[[str], bool]) -> psutil.Process:
    return next(process for process in run.below() if named(words_of(process)))


def test_a_frozen_rank_is_replaced_and_a_frozen_raylet_ends_the_run(
    run: Running, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    ended = lambda: run.process.poll() is not None  # noqa: E731
    wait_until(lambda: len(metrics(folder)) >= 4 or ended(), "three steps")
    rank = the(run, lambda words: words.startswith("ray::TrainerWorker"))
    rank.send_signal(signal.SIGSTOP)
    events = folder / EVENTS
    again = lambda: events.exists() and '"kind": "resume"' in events.read_text()  # noqa: E731
    wait_until(lambda: again() or ended(), "another start")
    since = metrics(folder)[-1]["step"]
    wait_until(lambda: metrics(folder)[-1]["step"] > since or ended(), "a step after it")
    below = run.below()
    raylet = the(run, lambda words: "/raylet" in words.split(" ")[0])
    raylet.send_signal(signal.SIGSTOP)
    said = run.finish(1)
    assert re.search(rf"trainer rank 0 \(process {rank.pid} on \S+\) has been stopped", said)
    assert re.search(r"The run restarts from step \d*[02468]\b", said)
    assert re.search(rf"keel train: Ray's node process \(raylet\) \(process {raylet.pid} ", said)
    assert "Traceback" not in said and "state-dump" not in said
    _, alive = psutil.wait_procs(below, timeout=DEADLINE_S)
    assert not alive
    steps = [line["step"] for line in metrics(folder)]
    assert steps == list(range(len(steps))), "each stands there once"
    assert all(line["ledger/lost"] == line["ledger/twice"] == 0 for line in metrics(folder)[1:])
