"""Progress of an evaluation, counted by scored prompts."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from keel.trainer.batch_stream import decoding_steps
from tests.trainer.test_loop import FakeRun, config


class Counting(FakeRun):
    def begin(self, activity: str) -> None:
        self.events.append(activity)

    def reach(self, done: int, total: int, unit: str) -> None:
        self.events.append(f"{done} of {total} {unit}")


def test_evaluation_reports_progress() -> None:
    run = Counting()
    run.run(config(steps=1))
    first = run.events.index("evaluating")
    last = len(run.events) - 1 - run.events[::-1].index("evaluating")
    assert first != last, "before the first step, and after the last one"
    for begun in (first, last):
        assert "1 of 1 prompts" in run.events[begun:]
    assert run.events.count("1 of 1 prompts") == 2


class Slow(Counting):
    """An evaluation that ends after some decoding steps; each poll sees ten more."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.held: list[tuple[Future[Any], Any]] = []

    def submit(self, what: Any, purpose: str) -> Future[Any]:
        answer = super().submit(what, purpose)
        if purpose == "train" or not hasattr(what, "messages"):
            return answer
        self.held.append((waiting := Future[Any](), answer.result()))
        return waiting

    def decoded(self) -> int:
        self.steps += 10
        if self.steps >= 50:
            for future, group in self.held:
                future.set_result(group)
            self.held.clear()
        return self.steps


def test_evaluation_shows_decoding_steps_before_scores() -> None:
    run, settings = Slow(), config(steps=1)
    run.run(settings)
    most = settings.rollout.sampling.max_tokens
    counted = [event for event in run.events if "decoding steps" in event]
    assert counted[:3] == [f"{n} of {most} decoding steps" for n in (10, 20, 30)]
    assert "1 of 1 prompts" in run.events


@pytest.mark.parametrize(("completions", "engines", "room", "waves"), [(8, 1, 4, 2), (6, 2, 4, 1)])
def test_decoding_steps_come_in_waves(
    completions: int, engines: int, room: int, waves: int
) -> None:
    base = config()
    rollout = replace(base.rollout, engines=engines, max_num_seqs=room)
    longest = base.rollout.sampling.max_tokens
    steps = decoding_steps(replace(base, rollout=rollout), completions)
    assert steps == engines * waves * longest
