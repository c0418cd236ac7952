"""The loop where there is no time: what is given up, what is saved, what is made up for later."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from tests.trainer.test_loop import FakeRun, config


class Hurried(FakeRun):
    """One that is preempted once `when` has happened; what is asked for then never comes."""

    def __init__(self, when: str, **changes: Any) -> None:
        super().__init__(**changes)
        self.when = when
        self.given_up: list[Future[Any]] = []

    def hurry(self) -> bool:
        return self.when in self.events

    def submit(self, what: Any, purpose: str) -> Future[Any]:
        answer = super().submit(what, purpose)
        if self.hurry():
            self.given_up.append(answer := Future())
        return answer

    def update(self, version: int, weights: Any) -> Future[None]:
        update = super().update(version, weights)
        return Future() if self.hurry() else update

    def stop(self) -> bool:
        return self.hurry()


@pytest.mark.parametrize(
    ("when", "saved", "reached"),
    [
        ("eval@0", [], 0),
        ("train@0", [], 0),  # as long as nothing is trained there is nothing to save
        ("step@1", ["save@1"], 1),  # done: it is saved, and nobody needs its weights
        ("update@1", ["save@1"], 1),
        ("train@1", ["save@1"], 1),  # given up: the step before it is saved
        ("eval@2", ["save@2"], 2),
        ("save@2", ["save@2"], 2),
        ("train@2", ["save@2"], 2),  # saved already
    ],
)
def test_a_hurried_run_gives_up_what_is_sampled_and_saves_what_is_trained(
    when: str, saved: list[str], reached: int
) -> None:
    world = Hurried(when)
    assert world.run(config(steps=9, eval_every=2, checkpoint_every=2)) == reached
    assert [event for event in world.events if event.startswith("save")] == saved
    assert sorted(world.records) == list(range(reached + 1)) if when != "eval@0" else [0]
    # Prompts whose completions were given up come again.
    if when == "train@1":
        assert world.unfinished == ["p2", "p3"]
    assert all(future.cancelled() for future in world.given_up)


def test_a_resumed_run_that_is_hurried_before_a_step_saves_nothing() -> None:
    world = Hurried("update@2", version=2)
    assert world.run(config(steps=9), start=2) == 2
    assert world.events == ["update@2"]


@pytest.mark.parametrize("start", [2, 3])
def test_an_evaluation_that_was_cut_off_is_made_when_the_run_goes_on(start: int) -> None:
    cut_off = Hurried(f"eval@{start}")
    changed = config(steps=3, eval_every=2)
    assert cut_off.run(changed) == start and not cut_off.evaluated(start)
    world = FakeRun(version=start)
    world.records.update({start: cut_off.records[start]})
    assert world.run(changed, start=start) == 3
    assert world.events[:2] == [f"update@{start}", f"eval@{start}"]
    assert world.evaluated(start) and world.evaluated(3)
    assert world.asked == (0 if start == 3 else world.asked)


def test_an_evaluation_made_late_can_end_the_run() -> None:
    world = FakeRun(version=2, stop_after=2)
    assert world.run(config(steps=3, eval_every=2), start=2) == 2
    assert world.events == ["update@2", "eval@2"] and world.evaluated(2)
