"""The loop against fakes: order of events, metrics, stopping, resuming, empty batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from keel.configs.schema import AlgorithmConfig, Config, DataConfig, RunConfig, SourceConfig
from keel.rl.metrics import Mean, Metric, Sum
from keel.rl.types import Group, Prompt, ScoredGroup, Segment, StepResult, Trajectory
from keel.trainer.guard import Saver
from keel.trainer.loop import Parts, train
from tests.rl.rollouts import prompt

SOURCE = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)


def config(algorithm: Mapping[str, Any] | None = None, **run: Any) -> Config:
    sizes = {"prompts_per_step": 2, "group_size": 2}
    return Config(
        run=RunConfig(**{"steps": 3, **run}),
        data=DataConfig(sources=(SOURCE,)),
        algorithm=AlgorithmConfig(**{**sizes, **(algorithm or {})}),
    )


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def answer(name: str, sibling: int, version: int) -> Trajectory:
    segment = Segment(
        prompt_id=name,
        token_ids_T=np.arange(4, dtype=np.int32),
        trainable_T=np.array([False, False, True, True]),
        logp_old_T=np.array([0, 0, -1, -1], np.float32),
        version_T=np.array([-1, -1, version, version], np.int32),
    )
    return Trajectory(
        prompt_id=name,
        sibling=sibling,
        segments=(segment,),
        finish_reason="stop",
        messages=({"role": "assistant", "content": "4", "raw": "4"},),
    )


class FakeRun:
    """All parts of a run in one object, which records events."""

    def __init__(
        self,
        *,
        empty: bool = False,
        stop_after: int | None = None,
        version: int = 0,
        easy: Sequence[str] = (),
        empty_eval: bool = False,
    ):
        self.events: list[str] = []
        self.records: dict[int, Mapping[str, Metric]] = {}
        self.version, self.engine_version = version, 0
        self.empty, self.stop_after, self.asked = empty, stop_after, 0
        self.easy, self.unfinished, self.unwritable = easy, list[str](), list[int]()
        self.empty_eval, self.partial = empty_eval, (1.0, 0.0)
        self.went_wrong: dict[str, Any] = {}

    def take(self, n: int) -> Sequence[Prompt]:
        self.asked += n
        return [prompt(f"p{self.asked - n + i}") for i in range(n)]

    def submit(self, what: Any, purpose: str) -> Future[Any]:
        """Implements both protocols: sampling a prompt and scoring a group."""
        return done(self.scored(what) if isinstance(what, Group) else self.sampled(what, purpose))

    def sampled(self, p: Prompt, purpose: str) -> Group:
        if self.events[-1:] != [f"{purpose}@{self.engine_version}"]:
            self.events.append(f"{purpose}@{self.engine_version}")
        if self.empty or (self.empty_eval and purpose == "eval"):
            return Group(prompt=p, trajectories=(), dropped=("late", "late"))
        both = tuple(answer(p.prompt_id, i, self.engine_version) for i in range(2))
        return Group(prompt=p, trajectories=both)

    def push(self, version: int) -> Future[None]:
        assert version == self.version
        self.engine_version = version
        self.events.append(f"update@{version}")
        return done(None)

    def metrics(self) -> Mapping[str, Metric]:
        return {"judge/calls": Sum(3)}

    def scored(self, group: Group) -> ScoredGroup:
        first, second = self.partial
        right = group.prompt.prompt_id in self.easy
        correct = [first, 1.0 if right else second][: len(group.trajectories)]
        rewards = np.array(correct, np.float32)
        return ScoredGroup(
            group=group,
            rewards_G=rewards,
            parts_G=tuple({"correct": value} for value in correct),
            advantages_G=rewards - rewards.mean() if len(rewards) else rewards,
        )

    def step(self, groups: Sequence[ScoredGroup]) -> StepResult:
        self.version += 1
        self.events.append(f"step@{self.version}")
        return StepResult(version=self.version, metrics={"loss": Mean(1.0, 1)}, **self.went_wrong)

    def begin(self, activity: str) -> None: ...
    def reach(self, done: int, total: int, unit: str) -> None: ...

    def record(
        self,
        step: int,
        metrics: Mapping[str, Metric],
        sample: Sequence[Any],
        discarded: Sequence[Any] = (),
    ) -> None:
        self.records[step] = {**self.records.get(step, {}), **metrics}

    def evaluated(self, step: int) -> bool:
        return any(name.startswith("eval/") for name in self.records.get(step, {}))

    def state(self, unfinished: Sequence[Prompt]) -> Mapping[str, Any]:
        return {"unfinished": [prompt.prompt_id for prompt in unfinished]}

    def save(self, step: int, cursor: Mapping[str, Any]) -> bool:
        self.events.append(f"save@{step}")
        self.unfinished = cursor["unfinished"]
        return step not in self.unwritable

    def stop(self) -> bool:
        return self.stop_after is not None and self.version >= self.stop_after

    def keep(self, step: int, groups: Sequence[ScoredGroup], findings: Sequence[str]) -> None:
        names = ",".join(group.group.prompt.prompt_id for group in groups)
        self.events.append(f"keep@{step} {names}: {'; '.join(findings)}")

    def hurry(self) -> bool:
        return False

    def leave(self) -> bool:
        return False

    def whole(self, error: Exception) -> bool:
        return True

    def run(self, config: Config, start: int = 0) -> int:
        parts = Parts(
            prompts=self,
            rollouts=self,
            rewards=self,
            learner=self,
            push=self.push,
            journal=self,
            heldout={"sums": [prompt("held")]},
            save=self.save,
            should_stop=self.stop,
            should_abort=self.hurry,
            should_skip_evaluation=self.leave,
            dump_bad_batch=self.keep,
            handle_failure=self.whole,
        )
        return train(parts, config, start=start)


def test_order_of_a_run() -> None:
    world = FakeRun()
    assert world.run(config(eval_every=2)) == 3
    assert world.events == [
        "eval@0",
        *("train@0", "step@1", "update@1"),
        *("train@1", "step@2", "update@2"),
        *("train@2", "eval@2"),  # engines do not wait for the evaluation
        *("step@3", "update@3", "eval@3", "save@3"),
    ]
    assert sorted(world.records) == [0, 1, 2, 3]
    assert "eval/sums/pass@1" in world.records[0]
    assert "eval/sums/pass@1" not in world.records[1]
    assert world.records[3]["eval/sums/pass@1"].value == 0.5


def test_publish_every_shows_staleness() -> None:
    world = FakeRun()
    world.run(config({"publish_every": 2}, steps=5))
    assert world.events == [
        *("eval@0", "train@0", "step@1", "step@2", "update@2"),
        *("train@2", "step@3", "step@4", "update@4"),
        *("train@4", "step@5", "update@5", "eval@5", "save@5"),
    ]
    assert [world.records[n]["staleness/mean"].value for n in range(1, 6)] == [0, 1, 0, 1, 0]
    assert "time/sync" not in world.records[1]


def test_stop_finishes_the_step_and_saves() -> None:
    world = FakeRun(stop_after=2)
    assert world.run(config()) == 2
    assert world.events[-3:] == ["update@2", "train@2", "save@2"]
    assert world.unfinished == ["p4", "p5"]


def test_resume_pushes_weights_first() -> None:
    world = FakeRun(version=2)
    assert world.run(config(), start=2) == 3
    assert world.events[:2] == ["update@2", "train@2"]
    assert sorted(world.records) == [3]


def test_checkpoints_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take 10 minutes: a checkpoint is due 30 minutes after the last one."""
    world, now = FakeRun(), [0.0]
    monkeypatch.setattr("keel.trainer.guard.time.monotonic", lambda: now[0])
    step = world.step

    def slow(groups: Sequence[ScoredGroup]) -> StepResult:
        now[0] += 600
        return step(groups)

    world.step = slow
    world.run(config(steps=12, checkpoint_every=5))
    saved = [event for event in world.events if event.startswith("save")]
    assert saved == ["save@3", "save@5", "save@8", "save@10", "save@12"]
    never = Saver(lambda *_: True, RunConfig(checkpoint_minutes=0), saved=0, tried_at=-1e9)
    assert not never.due(7)


def test_unwritten_checkpoint_is_retried() -> None:
    """A run stopped meanwhile takes another step and saves that."""
    world = FakeRun()
    world.unwritable, world.stop = [2, 3], lambda: "save@2" in world.events
    assert world.run(config(steps=9, checkpoint_every=2)) == 4
    assert [event for event in world.events if "save" in event] == ["save@2", "save@3", "save@4"]
    counts = [world.records[step].get("checkpoint/unwritten") for step in (2, 3, 4)]
    assert [count and count.value for count in counts] == [None, 1, 2]


def test_max_lag_bounds_sampling() -> None:
    world = FakeRun(stop_after=2)
    assert world.run(config({"max_lag": 1}, steps=9)) == 2
    assert world.events == [
        *("eval@0", "train@0", "step@1", "update@1", "train@1", "step@2", "update@2"),
        *("train@2", "save@2"),
    ]
    # Two batches at once, and one more with each update: four drawn, two trained on.
    assert world.asked == 8
    assert world.unfinished == ["p4", "p5", "p6", "p7"]
    assert world.records[2]["staleness/mean"].value == 1


def test_giving_up_saves_no_checkpoint() -> None:
    """Metrics of the failed step are recorded, as they explain the failure."""
    world = FakeRun()
    world.went_wrong = {"findings": ("a token",), "gave_up": "three in a row"}
    with pytest.raises(RuntimeError, match="step 1: three in a row"):
        world.run(config(checkpoint_every=1, eval_every=1))
    assert world.events[-2:] == ["step@1", "keep@1 p0,p1: a token"]
    assert "reward/mean" in world.records[1] and "loss" in world.records[1]
