"""The stream of batches, with futures resolved by hand."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from random import Random
from typing import Any

import pytest

from keel.configs.schema import AlgorithmConfig, Config, DataConfig, RunConfig, SourceConfig
from keel.rl.futures import done
from keel.rl.types import Group, Prompt, ScoredGroup
from keel.trainer.batch_stream import BatchStream
from tests.rl.rollouts import finished, prompt
from tests.waiting import PATIENCE_S


class FakeRequests:
    """Endless prompts, and the futures of all submitted requests."""

    def __init__(self, steps: int = 9, **algorithm: Any) -> None:
        config = Config(
            run=RunConfig(steps=steps),
            data=DataConfig(
                sources=(SourceConfig(name="s", source="reasoning_gym", task="t", size=9),)
            ),
            algorithm=AlgorithmConfig(prompts_per_step=2, group_size=2, **algorithm),
        )
        self.asked: dict[str, Future[Group]] = {}
        self.judged: dict[str, Future[ScoredGroup]] = {}
        self.feed = BatchStream(
            config,
            next_prompts=self.next_prompts,
            position=self.position,
            sample=self.sample,
            score=self.score,
            start=0,
        )

    def next_prompts(self, n: int) -> Sequence[Prompt]:
        return [prompt(f"p{len(self.asked) + i}") for i in range(n)]

    def position(self, unfinished: Sequence[Prompt]) -> dict[str, Any]:
        return {"taken": len(self.asked), "unfinished": [p.prompt_id for p in unfinished]}

    def sample(self, asked: Prompt) -> Future[Group]:
        return self.asked.setdefault(asked.prompt_id, Future())

    def score(self, group: Group) -> Future[ScoredGroup]:
        return self.judged.setdefault(group.prompt.prompt_id, Future())

    def sampled(self, *names: str) -> None:
        for name in names:
            self.asked[name].set_result(Group(prompt=prompt(name), trajectories=()))

    def finish(self, *names: str, version: int = 0) -> None:
        self.sampled(*names)
        for name in names:
            self.judged[name].set_result(finished(name, versions=(version,)))

    def take(self) -> list[str]:
        batch = self.feed.take(nullcontext)
        return [group.group.prompt.prompt_id for group in batch.groups]


def test_next_batch_waits_for_the_weights() -> None:
    world = FakeRequests()
    assert not world.asked, "nothing before it is opened"
    world.feed.open()
    assert list(world.asked) == ["p0", "p1"]
    world.sampled("p1")
    assert list(world.judged) == ["p1"]
    world.judged["p1"].set_result(finished("p1"))
    world.finish("p0")
    assert world.take() == ["p0", "p1"]
    assert len(world.asked) == 2
    update: Future[None] = Future()
    world.feed.adopting(1, update)
    assert len(world.asked) == 2
    update.set_result(None)
    assert list(world.asked) == ["p0", "p1", "p2", "p3"]


class Alarm(threading.Condition):
    """A clock that advances only during waits; each wait delivers the next group."""

    def __init__(self, world: FakeRequests, durations: Random) -> None:
        super().__init__(threading.RLock())
        self.world, self.random, self.now = world, durations, 0.0
        self.ends: dict[str, float] = {}
        self.durations: dict[str, float] = {}

    def begin(self, asked: Prompt) -> Future[Group]:
        name = asked.prompt_id
        self.durations[name] = self.random.lognormvariate(0, 1.2)
        self.ends[name] = self.now + self.durations[name]
        return self.world.sample(asked)

    def wait(self, timeout: float | None = None) -> bool:
        name = min(self.ends, key=lambda name: self.ends[name])
        self.now = self.ends.pop(name)
        self.world.judged[name] = Future()
        self.world.judged[name].set_result(finished(name))
        self.world.sampled(name)
        return True


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_trained_lengths_equal_sampled_lengths(lag: int) -> None:
    """Simulates a whole run with heavy-tailed durations."""
    world = FakeRequests(steps=150, max_lag=lag)
    alarm = Alarm(world, Random(lag))
    world.feed._changed, world.feed._sample = alarm, alarm.begin
    world.feed.open()
    trained: list[str] = []
    for step in range(1, 151):
        trained += world.take()
        if step < 150:
            world.feed.adopting(step, done())
    assert trained == list(alarm.durations) and len(trained) == 300


def test_closing_cancels_and_keeps_the_position() -> None:
    """Also groups that are being submitted meanwhile."""
    world = FakeRequests(max_lag=1)
    world.feed.open()
    world.finish("p2")
    assert world.feed.position()["unfinished"] == ["p0", "p1", "p2", "p3"]
    world.feed.close()
    assert all(world.asked[name].cancelled() for name in ("p0", "p1", "p3"))
    world, sample = FakeRequests(), FakeRequests.sample
    world.feed._sample = lambda asked: (world.feed.close(), sample(world, asked))[1]
    world.feed.open()
    assert [future.cancelled() for future in world.asked.values()] == [True, True]


@pytest.mark.parametrize("part", ["_next_prompts", "_sample"])
def test_errors_while_submitting_end_the_wait(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are submitted from callbacks, whose errors futures swallow."""
    world = FakeRequests()
    world.feed.open()
    world.finish("p0", "p1")
    world.take()

    def broken(_: object) -> Any:
        raise ValueError("a bug")

    monkeypatch.setattr(world.feed, part, broken)
    monkeypatch.setattr(world.feed, "_timeout_s", 0.02)
    world.feed.adopting(1, done())
    with pytest.raises(ValueError, match="a bug"):
        world.take()
    assert not world.feed._sampling and not world.feed._in_flight


def test_position_is_consistent() -> None:
    """Otherwise a prompt would count as drawn but not as unfinished, and a resumed run would skip
    it."""
    world, update = FakeRequests(max_lag=1), Future[None]()
    world.feed.open()
    world.finish("p0", "p1")
    world.take()
    world.feed.adopting(1, update)
    adopted, position = threading.Thread(target=update.set_result, args=(None,)), world.position

    def slowly(unfinished: Sequence[Prompt]) -> dict[str, Any]:
        adopted.start()
        adopted.join(timeout=0.1)
        return position(unfinished)

    world.feed._position = slowly
    assert world.feed.position() == {"taken": 4, "unfinished": ["p2", "p3"]}
    adopted.join(timeout=PATIENCE_S)
    assert len(world.asked) == 6
