"""The loop against fakes: order of events, stops, failures and resumes."""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from keel.configs.schema import AlgorithmConfig, Config, DataConfig, RunConfig, SourceConfig
from keel.rl.futures import failed
from keel.rl.metrics import Mean, Metric, Sum
from keel.rl.types import Group, Prompt, ScoredGroup, StepResult
from keel.trainer.batch_stream import BatchStream
from keel.trainer.loop import Parts, Saver, train
from tests.data.test_stream import stream
from tests.rl.rollouts import finished, prompt, segment, trajectory
from tests.waiting import PATIENCE_S

SOURCE = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)


def config(algorithm: Mapping[str, Any] | None = None, **run: Any) -> Config:
    sizes = {"prompts_per_step": 2, "group_size": 2}
    return Config(
        run=RunConfig(**{"steps": 3, **run}),
        data=DataConfig(sources=(SOURCE,)),
        algorithm=AlgorithmConfig(**{**sizes, **(algorithm or {})}),
    )


def done(value: Any = None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class FakeRun:
    """All parts of a run in one object, which records events."""

    def __init__(
        self, *, stop_after: int | None = None, version: int = 0, easy: Sequence[str] = ()
    ):
        self.events: list[str] = []
        self.records: dict[int, Mapping[str, Metric]] = {}
        self.version, self.engine_version = version, 0
        self.empty, self.stop_after, self.asked = False, stop_after, 0
        self.easy, self.unfinished, self.unwritable = easy, list[str](), list[int]()
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
        if self.empty:
            return Group(prompt=p, trajectories=(), dropped=("late", "late"))
        sampled = segment(name=p.prompt_id, context=2, version=self.engine_version)
        return Group(prompt=p, trajectories=tuple(trajectory(sampled, sibling=i) for i in (0, 1)))

    def push(self, version: int) -> Future[None]:
        assert version == self.version
        self.engine_version = version
        self.events.append(f"update@{version}")
        return done(None)

    def metrics(self) -> Mapping[str, Metric]:
        return {"judge/calls": Sum(3)}

    def scored(self, group: Group) -> ScoredGroup:
        right = group.prompt.prompt_id in self.easy
        correct = [1.0, float(right)][: len(group.trajectories)]
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
    def show_progress(self, done: int, total: int, unit: str) -> None: ...

    def record(self, step: int, metrics: Mapping[str, Metric], *_: Sequence[Any]) -> None:
        self.records[step] = {**self.records.get(step, {}), **metrics}

    def evaluated(self, step: int) -> bool:
        return any(name.startswith("eval/") for name in self.records.get(step, {}))

    def position(self, unfinished: Sequence[Prompt]) -> Mapping[str, Any]:
        return {"unfinished": [prompt.prompt_id for prompt in unfinished]}

    def save(self, step: int, position: Mapping[str, Any]) -> bool:
        self.events.append(f"save@{step}")
        self.unfinished = position["unfinished"]
        return step not in self.unwritable

    def stop(self) -> bool:
        return self.stop_after is not None and self.version >= self.stop_after

    def keep(self, step: int, groups: Sequence[ScoredGroup], findings: Sequence[str]) -> None:
        names = ",".join(group.group.prompt.prompt_id for group in groups)
        self.events.append(f"keep@{step} {names}: {'; '.join(findings)}")

    def hurry(self) -> bool:
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
            dump_bad_batch=self.keep,
            decoding_steps=lambda: 0,
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


def test_checkpoints_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world, now = FakeRun(), [0.0]
    monkeypatch.setattr("keel.trainer.loop.time.monotonic", lambda: now[0])
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
    world = FakeRun()
    world.went_wrong = {"findings": ("a token",), "gave_up": "three in a row"}
    with pytest.raises(RuntimeError, match="step 1: three in a row"):
        world.run(config(checkpoint_every=1, eval_every=1))
    assert world.events[-2:] == ["step@1", "keep@1 p0,p1: a token"]
    assert "reward/mean" in world.records[1] and "loss" in world.records[1]


class Disturbed(FakeRun):
    """After event `when`, the run is aborted ("abort"), asked to stop during an evaluation that
    never ends ("stop"), or engines and rewards fail ("fail")."""

    def __init__(self, when: str, how: str) -> None:
        super().__init__()
        self.when, self.how = when, how
        self.given_up: list[Future[Any]] = []

    def by(self, *how: str) -> bool:
        return self.when in self.events and self.how in how

    def hurry(self) -> bool:
        return self.by("abort")

    def stop(self) -> bool:
        return self.by("abort", "stop")

    def whole(self, error: Exception) -> bool:
        self.events.append(f"asked about {error}")
        return True

    def submit(self, what: Any, purpose: str) -> Future[Any]:
        answer = super().submit(what, purpose)
        if self.by("fail"):
            return failed(RuntimeError("all is over"))
        if self.by("abort") or (self.by("stop") and purpose == "eval"):
            self.given_up.append(answer := Future())
        return answer

    def push(self, version: int) -> Future[None]:
        update = super().push(version)
        if self.by("fail"):
            return failed(RuntimeError("all is over"))
        return Future() if self.by("abort") else update


@pytest.mark.parametrize(
    ("when", "saved", "reached"),
    [
        ("eval@0", [], 0),
        ("train@0", [], 0),  # nothing to save before the first step
        ("step@1", ["save@1"], 1),  # saved, without pushing its weights
        ("train@1", ["save@1"], 1),  # aborted: the step before it is saved
        ("eval@2", ["save@2"], 2),
        ("train@2", ["save@2"], 2),  # saved already
    ],
)
def test_abort_saves_the_last_trained_step(when: str, saved: list[str], reached: int) -> None:
    world = Disturbed(when, "abort")
    assert world.run(config(steps=9, eval_every=2, checkpoint_every=2)) == reached
    assert [event for event in world.events if event.startswith("save")] == saved
    assert sorted(world.records) == list(range(reached + 1)) if when != "eval@0" else [0]
    # Prompts of cancelled completions are repeated.
    if when == "train@1":
        assert world.unfinished == ["p2", "p3"]
    assert all(future.cancelled() for future in world.given_up)


@pytest.mark.parametrize(("when", "saved"), [("eval@0", []), ("eval@2", ["save@2"])])
def test_stop_cuts_evaluations_short(when: str, saved: list[str]) -> None:
    world = Disturbed(when, "stop")
    assert world.run(config(steps=9, eval_every=2)) == int(when[-1])
    assert [event for event in world.events if event.startswith("save")] == saved
    assert not world.evaluated(int(when[-1]))


@pytest.mark.parametrize("start", [2, 3])
def test_cut_evaluation_is_made_up_for(start: int) -> None:
    cut_off = Disturbed(f"eval@{start}", "abort")
    changed = config(steps=3, eval_every=2)
    assert cut_off.run(changed) == start and not cut_off.evaluated(start)
    world = FakeRun(version=start)
    world.records.update({start: cut_off.records[start]})
    assert world.run(changed, start=start) == 3
    assert world.events[:2] == [f"update@{start}", f"eval@{start}"]
    assert world.evaluated(start) and world.evaluated(3)
    assert world.asked == (0 if start == 3 else world.asked)


@pytest.mark.parametrize(
    ("when", "saved", "recorded"),
    [
        ("train@0", [], 0),  # there is nothing to save
        ("step@1", ["save@1"], 1),  # its weights are not pushed
        ("train@2", ["save@2"], 2),  # before step 2 is evaluated
        ("train@3", ["save@2", "save@3"], 3),
    ],
)
def test_engine_errors_leave_a_checkpoint(when: str, saved: list[str], recorded: int) -> None:
    world = Disturbed(when, "fail")
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


class CountedRun(FakeRun):
    """Takes its prompts from a stream, and counts what happens to them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stream, self.saved = stream(), dict[str, Any]()
        self.drawn, self.trained, self.filtered = (Counter[str]() for _ in range(3))

    def take(self, n: int) -> Sequence[Prompt]:
        prompts = self.stream.take(n)
        self.drawn.update(prompt.prompt_id for prompt in prompts)
        return prompts

    def position(self, unfinished: Sequence[Prompt]) -> Mapping[str, Any]:
        return self.stream.position(unfinished)

    def record(self, step: int, metrics: Any, groups: Any, discarded: Any = ()) -> None:
        super().record(step, metrics, groups, discarded)
        self.trained.update(group.group.prompt.prompt_id for group in groups)
        self.filtered.update(group.group.prompt.prompt_id for group in discarded)

    def save(self, step: int, position: Mapping[str, Any]) -> bool:
        self.saved = dict(position)
        return super().save(step, position)


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("easy", [(), ("a/1", "a/3", "b/2"), ("a/0", "a/1", "a/2", "a/3", "a/4")])
def test_resumed_run_loses_and_repeats_no_prompt(lag: int, easy: tuple[str, ...]) -> None:
    algorithm = {"max_lag": lag, "filter_groups": "correct", "max_refills": 2.0}
    first = CountedRun(easy=easy, stop_after=3)
    first.run(config(algorithm, steps=8))
    second = CountedRun(easy=easy, version=3)
    second.stream.restore(first.saved)
    second.run(config(algorithm, steps=8), start=3)
    assert first.trained.total() == 6 and second.trained.total() == 10
    assert len(first.saved["unfinished"]) == 2 * (lag + 1) or easy, "sampled ahead"
    for run, drawn in ((first, first.drawn), (second, second.drawn)):
        ends = run.trained + run.filtered + Counter(run.saved["unfinished"])
        assert not ends - drawn, "a prompt was trained on twice"
        # Filtered groups of a batch that was never full are not reported.
        assert set(drawn - ends) <= set(easy), "a prompt was lost"


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
    world.feed.track_update(1, update)
    assert len(world.asked) == 2
    update.set_result(None)
    assert list(world.asked) == ["p0", "p1", "p2", "p3"]


def test_closing_cancels_and_keeps_the_position() -> None:
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
    world = FakeRequests()
    world.feed.open()
    world.finish("p0", "p1")
    world.take()

    def broken(_: object) -> Any:
        raise ValueError("a bug")

    monkeypatch.setattr(world.feed, part, broken)
    monkeypatch.setattr(world.feed, "_timeout_s", 0.02)
    world.feed.track_update(1, done())
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
    world.feed.track_update(1, update)
    updated, position = threading.Thread(target=update.set_result, args=(None,)), world.position

    def slowly(unfinished: Sequence[Prompt]) -> dict[str, Any]:
        updated.start()
        updated.join(timeout=0.1)
        return position(unfinished)

    world.feed._position = slowly
    assert world.feed.position() == {"taken": 4, "unfinished": ["p2", "p3"]}
    updated.join(timeout=PATIENCE_S)
    assert len(world.asked) == 6
