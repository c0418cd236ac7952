"""Engines that live, have something to sample and finish no step, by a clock of the test's."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from keel.rollout.pool import stall_detector as pulse
from keel.rollout.pool.requests import Slot
from keel.rollout.pool.stall_detector import LOOK_S, SAID_S, STUCK_S, Pulses
from keel.rollout.spec import EngineError, Progress
from tests.rl.rollouts import prompt
from tests.rollout.pool.fake_engines import FakeEngine, World, done, failed
from tests.waiting import PATIENCE_S, wait_for


class Watched:
    """A slot whose engine answers what the test says, looked at every `LOOK_S`."""

    def __init__(self) -> None:
        self.now, self.answer = 0.0, done(Progress(steps=1, longest_s=0.5, orders=2))
        self.world, self.said = World(engines=1), list[str]()
        self.world.progress = lambda engine: self.answer
        self.slot = Slot(0, self.world.build(0), "ready", None, 0.0, sequences=8)
        self.pulses = Pulses(lambda: self.now)

    def runs(self, seconds: float, *, steps: Sequence[int] = ()) -> float | None:
        """When its engine was taken for dead; steps: what it has finished at each look."""
        begun, counts = self.now, list(steps)
        while self.now < begun + seconds:
            if counts:
                self.answer = done(Progress(steps=counts.pop(0), longest_s=0.5, orders=2))
            self.now += LOOK_S
            for slot, error in self.pulses.look([self.slot], self.said.append):
                assert slot is self.slot and isinstance(error, EngineError)
                self.said.append(str(error))
                return self.now - begun
        return None


def test_no_step_for_a_minute_is_said_after_twenty_seconds_and_then_the_end_of_the_engine() -> None:
    watched = Watched()
    at = watched.runs(600)
    assert at is not None and STUCK_S <= at <= STUCK_S + 2 * LOOK_S
    first, last = watched.said
    assert first.startswith("rollout engine 0 has finished no step for 20 s, with 8 completions")
    assert "After 60 s it is started again" in first
    assert last.startswith("hangs: it has finished no step for 60 s") and "took 0.5 s" in last


def test_an_engine_that_gets_on_is_left_alone_however_slowly() -> None:
    watched = Watched()
    often = [1 + look // 3 for look in range(600)]
    assert watched.runs(1000, steps=often) is None and not watched.said


def test_ten_of_its_longest_steps_are_waited_for() -> None:
    watched = Watched()
    watched.answer = done(Progress(steps=7, longest_s=30.0, orders=2))
    at = watched.runs(600)
    assert at is not None and 300 <= at <= 300 + 2 * LOOK_S
    assert watched.said[0].startswith("rollout engine 0 has finished no step for 120 s")


@pytest.mark.parametrize(
    "change",
    [
        {"answer": Progress(steps=0, orders=2)},  # its first step, which may compile
        {"answer": Progress(steps=9, longest_s=0.5, orders=0)},  # what it has done is on its way
        {"stage": "loading"},
        {"stage": "asleep"},
        {"sequences": 0},
    ],
)
def test_what_is_no_step_under_way_does_not_count(change: dict[str, Any]) -> None:
    watched = Watched()
    if "answer" in change:
        watched.answer = done(change["answer"])
    else:
        assert watched.runs(SAID_S) is None  # it has finished steps before
        setattr(watched.slot, *next(iter(change.items())))
    assert watched.runs(10_000) is None
    if "answer" not in change:
        watched.slot.stage, watched.slot.sequences = "ready", 8
        assert watched.runs(STUCK_S - LOOK_S) is None, "what was before has been forgotten"


def test_a_driver_that_was_stopped_has_not_looked_meanwhile() -> None:
    watched = Watched()
    assert watched.runs(10) is None
    watched.now += 3600
    assert watched.runs(STUCK_S - 6 * LOOK_S) is None


def test_an_engine_that_does_not_even_answer_is_taken_for_dead_too() -> None:
    watched = Watched()
    assert watched.runs(10) is None
    watched.answer = Future()
    assert watched.runs(600) is not None


def test_an_engine_that_has_died_is_not_this_ones_to_replace() -> None:
    watched = Watched()
    assert watched.runs(10) is None
    watched.answer = failed(EngineError("killed"))
    assert watched.runs(30) is None


def test_a_new_engine_begins_anew() -> None:
    watched = Watched()
    assert watched.runs(STUCK_S - LOOK_S) is None
    watched.slot.engine = watched.world.build(0)
    assert watched.runs(STUCK_S - LOOK_S) is None


def test_the_pool_replaces_it_and_loses_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "LOOK_S", 0.01)
    monkeypatch.setattr(pulse, "STUCK_S", 0.1)
    monkeypatch.setattr(pulse, "SAID_S", 0.02)

    def answer(engine: FakeEngine, name: str) -> None:
        if engine.name != "0.0":
            engine.finish(name)

    world, said = World(answer=answer, engines=1), list[str]()
    world.progress = lambda engine: done(Progress(steps=3, longest_s=0.001, orders=1))
    world.pool.say = said.append
    world.pool.start()
    group = world.pool.submit(prompt("p"), group_size=2)
    assert not group.result(timeout=PATIENCE_S).dropped
    assert world.names() == ["0.0", "0.1"] and world.lives[0].killed
    wait_for(lambda: len(said) == 2)
    assert said[1].startswith("rollout engine 0 is started again: hangs: it has finished no step")
    world.pool.shutdown()
