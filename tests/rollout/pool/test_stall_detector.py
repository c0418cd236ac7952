"""Tests the detection of engines that still answer but finish no steps."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from keel.rollout.pool import stall_detector
from keel.rollout.pool.engine_supervisor import EngineSlot
from keel.rollout.pool.stall_detector import POLL_S, STUCK_S, WARN_S, StallDetector
from keel.rollout.spec import EngineError, EngineProgress
from tests.rollout.pool.fake_engines import World, done, failed
from tests.waiting import wait_for


class Watched:
    """A slot with a scripted engine that is polled every `POLL_S` seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answer: Future[Any] = done(EngineProgress(steps=1, longest_s=0.5, requests=2))
        self.world, self.warnings = World(engines=1), list[float]()
        self.world.progress = lambda _: self.answer
        self.slot = EngineSlot(0, self.world.build(0), "ready", None, 0.0, sequences=8)
        self.detector = StallDetector(lambda: self.now)

    def run(self, seconds: float, *, steps: Sequence[int] = ()) -> float | None:
        """Poll until the engine counts as stuck. `steps` is the number of finished steps at each
        poll."""
        begin, counts = self.now, list(steps)
        while self.now < begin + seconds:
            if counts:
                self.answer = done(EngineProgress(counts.pop(0), longest_s=0.5, requests=2))
            self.now += POLL_S
            warn = lambda _: self.warnings.append(self.now - begin)  # noqa: E731
            for slot, error in self.detector.poll([self.slot], warn):
                assert slot is self.slot and isinstance(error, EngineError)
                return self.now - begin
        return None


@pytest.mark.parametrize(
    ("longest_s", "warn_s", "stuck_s"), [(0.5, WARN_S, STUCK_S), (30.0, 120.0, 300.0)]
)
def test_a_stalled_engine_is_warned_about_then_replaced(
    longest_s: float, warn_s: float, stuck_s: float
) -> None:
    watched = Watched()
    watched.answer = done(EngineProgress(steps=7, longest_s=longest_s, requests=2))
    stuck = watched.run(600)
    assert stuck is not None and stuck_s <= stuck <= stuck_s + 2 * POLL_S
    (warned,) = watched.warnings
    assert warn_s <= warned <= warn_s + 2 * POLL_S


def test_slow_progress_is_not_a_stall() -> None:
    watched = Watched()
    assert watched.run(1000, steps=[1 + poll // 3 for poll in range(600)]) is None
    assert not watched.warnings


@pytest.mark.parametrize(
    "change",
    [
        {"answer": EngineProgress(steps=0, requests=2)},  # the first step may compile
        {"answer": EngineProgress(steps=9, longest_s=0.5, requests=0)},  # results on their way
        {"stage": "loading"},
        {"stage": "asleep"},
        {"sequences": 0},
    ],
)
def test_time_without_a_running_step_does_not_count(change: dict[str, Any]) -> None:
    watched = Watched()
    if "answer" in change:
        watched.answer = done(change["answer"])
    else:
        assert watched.run(WARN_S) is None
        setattr(watched.slot, *next(iter(change.items())))
    assert watched.run(10_000) is None
    if "answer" not in change:
        watched.slot.stage, watched.slot.sequences = "ready", 8
        assert watched.run(STUCK_S - POLL_S) is None


def test_a_suspended_driver_does_not_count() -> None:
    watched = Watched()
    assert watched.run(10) is None
    watched.now += 3600
    assert watched.run(STUCK_S - 6 * POLL_S) is None


def test_only_unanswered_polls_count_as_a_stall() -> None:
    watched = Watched()
    assert watched.run(10) is None
    watched.answer = failed(EngineError("killed"))  # the dispatcher replaces it
    assert watched.run(30) is None
    watched.answer = Future()
    assert watched.run(600) is not None


def test_a_new_engine_starts_from_zero() -> None:
    watched = Watched()
    assert watched.run(STUCK_S - POLL_S) is None
    watched.slot.engine = watched.world.build(0)
    assert watched.run(STUCK_S - POLL_S) is None


def test_the_pool_replaces_a_stalled_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("POLL_S", 0.01), ("STUCK_S", 0.1), ("WARN_S", 0.02)):
        monkeypatch.setattr(stall_detector, name, seconds)
    world, lines = World(lambda e, n: e.name != "0.0" and e.finish(n), engines=1), list[str]()
    world.progress = lambda _: done(EngineProgress(steps=3, longest_s=0.001, requests=1))
    world.pool.say = lines.append
    assert world.run(1) == ["p0"]
    assert world.names() == ["0.0", "0.1"] and world.lives[0].killed
    wait_for(lambda: len(lines) == 2)
    world.pool.shutdown()
