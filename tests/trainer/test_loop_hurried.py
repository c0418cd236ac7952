"""Aborts, stops and failures of the loop: cancelled work, saved state and recovery."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from tests.trainer.test_loop import FakeRun, config


class Hurried(FakeRun):
    """Preempted after event `when`; later requests never finish."""

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

    def push(self, version: int) -> Future[None]:
        update = super().push(version)
        return Future() if self.hurry() else update

    def stop(self) -> bool:
        return self.hurry()


@pytest.mark.parametrize(
    ("when", "saved", "reached"),
    [
        ("eval@0", [], 0),
        ("train@0", [], 0),  # nothing to save before the first step
        ("step@1", ["save@1"], 1),  # saved, without pushing its weights
        ("update@1", ["save@1"], 1),
        ("train@1", ["save@1"], 1),  # aborted: the step before it is saved
        ("eval@2", ["save@2"], 2),
        ("save@2", ["save@2"], 2),
        ("train@2", ["save@2"], 2),  # saved already
    ],
)
def test_abort_saves_the_last_trained_step(when: str, saved: list[str], reached: int) -> None:
    world = Hurried(when)
    assert world.run(config(steps=9, eval_every=2, checkpoint_every=2)) == reached
    assert [event for event in world.events if event.startswith("save")] == saved
    assert sorted(world.records) == list(range(reached + 1)) if when != "eval@0" else [0]
    # Prompts of cancelled completions are repeated.
    if when == "train@1":
        assert world.unfinished == ["p2", "p3"]
    assert all(future.cancelled() for future in world.given_up)


class Asked(FakeRun):
    """Interrupted by Ctrl-C during an evaluation that never ends."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    def leave(self) -> bool:
        return self.when in self.events

    def stop(self) -> bool:
        return self.leave()

    def submit(self, what: Any, purpose: str) -> Future[Any]:
        answer = super().submit(what, purpose)
        return Future() if self.leave() and purpose == "eval" else answer


@pytest.mark.parametrize(("when", "saved"), [("eval@0", []), ("eval@2", ["save@2"])])
def test_stop_cuts_evaluations_short(when: str, saved: list[str]) -> None:
    world = Asked(when)
    assert world.run(config(steps=9, eval_every=2)) == int(when[-1])
    assert [event for event in world.events if event.startswith("save")] == saved
    assert not world.evaluated(int(when[-1]))


@pytest.mark.parametrize("start", [2, 3])
def test_cut_evaluation_is_made_up_for(start: int) -> None:
    cut_off = Hurried(f"eval@{start}")
    changed = config(steps=3, eval_every=2)
    assert cut_off.run(changed) == start and not cut_off.evaluated(start)
    world = FakeRun(version=start)
    world.records.update({start: cut_off.records[start]})
    assert world.run(changed, start=start) == 3
    assert world.events[:2] == [f"update@{start}", f"eval@{start}"]
    assert world.evaluated(start) and world.evaluated(3)
    assert world.asked == (0 if start == 3 else world.asked)


class Failing(FakeRun):
    """Engines or rewards fail after event `when`."""

    def __init__(self, when: str, *, whole: bool = True) -> None:
        super().__init__()
        self.when, self.is_whole = when, whole

    def whole(self, error: Exception) -> bool:
        self.events.append(f"asked about {error}")
        return self.is_whole

    def submit(self, what: Any, purpose: str) -> Future[Any]:
        answer = super().submit(what, purpose)
        return failed() if self.when in self.events else answer

    def push(self, version: int) -> Future[None]:
        update = super().push(version)
        return failed() if self.when in self.events else update


def failed() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(RuntimeError("all is over"))
    return future


@pytest.mark.parametrize(
    ("when", "saved", "recorded"),
    [
        ("train@0", [], 0),  # there is nothing to save
        ("step@1", ["save@1"], 1),  # its weights are not pushed
        ("train@1", ["save@1"], 1),
        ("eval@2", ["save@2"], 2),
        ("train@2", ["save@2"], 2),  # before step 2 is evaluated
        ("train@3", ["save@2", "save@3"], 3),
    ],
)
def test_engine_errors_leave_a_checkpoint(when: str, saved: list[str], recorded: int) -> None:
    world = Failing(when)
    with pytest.raises(RuntimeError, match="all is over") as raised:
        world.run(config(steps=9, eval_every=2, checkpoint_every=2))
    assert [event for event in world.events if event.startswith("save")] == saved
    assert sorted(world.records) == list(range(recorded + 1))
    message = f"Rerun the same command to resume from step {recorded}"
    assert getattr(raised.value, "__notes__", []) == [message] * (recorded > 0)
    assert len([event for event in world.events if event.startswith("asked")]) == 1


def test_prompts_of_an_empty_batch_repeat() -> None:
    class Empty(FakeRun):
        def step(self, groups: Any) -> Any:
            self.empty = True
            return super().step(groups)

    world = Empty()
    with pytest.raises(RuntimeError, match="none of 2 groups has a completion") as raised:
        world.run(config(steps=9, eval_every=5))
    assert world.events[-1] == "save@1" and world.unfinished == ["p2", "p3"]
    assert "resume from step 1" in raised.value.__notes__[0]
