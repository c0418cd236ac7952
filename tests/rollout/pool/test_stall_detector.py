"""Tests that engines are detected if they still answer but no longer finish steps."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from keel.rollout.pool.engine_supervisor import (
    PROGRESS_POLL_S,
    STUCK_S,
    WARN_S,
    EngineSlot,
    StallDetector,
)
from keel.rollout.spec import EngineError, EngineProgress
from tests.rollout.pool.fake_engines import World, done, failed


class Watched:
    """A slot with a scripted engine, which is polled every `PROGRESS_POLL_S` seconds."""

    def __init__(self, steps: int = 1, longest_s: float = 0.5, requests: int = 2) -> None:
        self.now = 0.0
        self.answer: Future[Any] = done(EngineProgress(steps, longest_s, requests))
        self.world, self.warnings = World(engines=1), list[float]()
        self.world.progress = lambda _: self.answer
        self.slot = EngineSlot(0, self.world.build(0), "ready", None, 0.0, sequences=8)
        self.detector = StallDetector(lambda: self.now)

    def run(self, seconds: float, *, steady: bool = False) -> float | None:
        """Poll until the engine counts as stuck. If `steady` is set, it finishes a step in every
        third poll."""
        begin = self.now
        while self.now < begin + seconds:
            if steady:
                self.answer = done(EngineProgress(int(self.now / PROGRESS_POLL_S) // 3, 0.5, 2))
            self.now += PROGRESS_POLL_S
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
    watched = Watched(steps=7, longest_s=longest_s)
    stuck = watched.run(600)
    assert stuck is not None and stuck_s <= stuck <= stuck_s + 2 * PROGRESS_POLL_S
    (warned,) = watched.warnings
    assert warn_s <= warned <= warn_s + 2 * PROGRESS_POLL_S


def test_slow_progress_is_not_a_stall() -> None:
    watched = Watched()
    assert watched.run(1000, steady=True) is None and not watched.warnings


def test_time_without_a_running_step_does_not_count() -> None:
    assert Watched(steps=0).run(10_000) is None  # the first step may compile
    assert Watched(requests=0).run(10_000) is None  # results are on their way
    for name, value in (("stage", "loading"), ("stage", "asleep"), ("sequences", 0)):
        watched = Watched()
        assert watched.run(WARN_S) is None
        setattr(watched.slot, name, value)
        assert watched.run(10_000) is None
        watched.slot.stage, watched.slot.sequences = "ready", 8
        assert watched.run(STUCK_S - PROGRESS_POLL_S) is None


def test_a_suspended_driver_does_not_count() -> None:
    watched = Watched()
    assert watched.run(10) is None
    watched.now += 3600
    assert watched.run(STUCK_S - 6 * PROGRESS_POLL_S) is None


def test_only_unanswered_polls_count_as_a_stall() -> None:
    watched = Watched()
    assert watched.run(10) is None
    watched.answer = failed(EngineError("killed"))  # the dispatcher replaces it
    assert watched.run(30) is None
    watched.answer = Future()
    assert watched.run(600) is not None
