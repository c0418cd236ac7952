"""The engine's thread with a fake engine: batching, cancelling, updates, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.types import Group, Prompt
from keel.rollout.engine.thread import EngineThread
from keel.rollout.spec import EngineError, RecordingError
from keel.weights.buckets import Bucket
from tests.rl.rollouts import prompt
from tests.waiting import PATIENCE_S, wait_for


class FakeEngine:
    """Answers every group in the next step, while `go` is set."""

    def __init__(self) -> None:
        self.version, self.sampled_tokens, self.recordings = 0, 0, 0
        self.steps = self.fast_steps = 0
        self.jobs: dict[int, Prompt] = {}
        self.updating = False
        self.events: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self.fail: Callable[[], None] = lambda: None
        self.deaf = False
        """Whether what is cut goes on."""

    @property
    def busy(self) -> bool:
        return bool(self.jobs) and not self.updating

    @property
    def whole(self) -> bool:
        return not self.updating

    def add(self, job: int, prompt: Prompt, **options: Any) -> None:
        if not self.whole:
            raise AssertionError("the weights are incomplete")
        self.jobs[job] = prompt
        if prompt.prompt_id == "long":
            raise ValueError("prompt long: does not fit")

    def step(self) -> Iterator[tuple[int, Group]]:
        self.fail()
        if self.go.wait(timeout=0.01):
            self.events.append("+".join(prompt.prompt_id for prompt in self.jobs.values()))
            for job in list(self.jobs):
                yield job, Group(prompt=self.jobs.pop(job), trajectories=())

    def abort(self, job: int) -> None:
        if self.jobs.pop(job, None) is not None:
            self.events.append(f"abort {job}")

    def cut(self, job: int) -> list[tuple[int, Group]]:
        self.events.append(f"cut {self.jobs[job].prompt_id}")
        if not self.deaf:
            self.go.set()
        return []

    def give_up(self, job: int) -> list[tuple[int, Group]]:
        self.events.append(f"give up {self.jobs[job].prompt_id}")
        return [(job, Group(prompt=self.jobs.pop(job), trajectories=(), dropped=("late",)))]

    def sleep(self) -> list[tuple[int, Group]]:
        return self.pause("asleep")

    def begin_update(self) -> list[tuple[int, Group]]:
        return self.pause("begin")

    def pause(self, event: str) -> list[tuple[int, Group]]:
        """What was already on its way arrives."""
        self.updating = True
        self.events.append(event)
        names = {prompt.prompt_id: job for job, prompt in self.jobs.items()}
        if (job := names.get("nearly")) is None:
            return []
        return [(job, Group(prompt=self.jobs.pop(job), trajectories=()))]

    def load_bucket(self, bucket: Bucket) -> None:
        if bucket == "bad":
            raise ValueError("no such tensor")
        self.events.append(f"load {bucket}")

    def finish_update(self, version: int, checksum: int | None = None) -> None:
        self.version, self.updating = version, False
        self.events.append("finish")


def update(engine: EngineThread, version: int, *buckets: Any) -> None:
    """Replace all weights."""
    engine.begin_update()
    for bucket in buckets:
        engine.load_bucket(bucket)
    engine.finish_update(version)


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


def config(**changes: Any) -> RolloutConfig:
    given = {"update_timeout_s": PATIENCE_S, **changes}
    return RolloutConfig(sampling=SamplingConfig(max_tokens=8), **given)


@pytest.fixture
def engine(fake: FakeEngine) -> Iterator[EngineThread]:
    engine = EngineThread(lambda: fake, config())
    yield engine
    engine.close()


@pytest.fixture
def draining(fake: FakeEngine) -> Iterator[EngineThread]:
    engine = EngineThread(lambda: fake, config(weight_updates="drain"))
    yield engine
    engine.close()


def test_groups_that_come_together_share_a_batch(engine: EngineThread, fake: FakeEngine) -> None:
    fake.go.clear()
    futures = [engine.submit(prompt(name), group_size=2) for name in "abc"]
    while engine.stats()["groups"] < 3:
        pass
    fake.go.set()
    assert [future.result(PATIENCE_S).prompt.prompt_id for future in futures] == ["a", "b", "c"]
    assert fake.events == ["a+b+c"]


def test_how_far_it_has_come_is_said_while_a_step_of_it_hangs(
    engine: EngineThread, fake: FakeEngine
) -> None:
    engine.submit(prompt("a"), group_size=1).result(PATIENCE_S)
    wait_for(lambda: engine.progress().steps == 1)
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        goes_on.wait(PATIENCE_S)

    fake.fail = hang
    late = engine.submit(prompt("b"), group_size=1)
    assert hangs.wait(PATIENCE_S)
    asked = engine.progress()
    assert (asked.steps, asked.orders) == (1, 1) and asked.longest_s < PATIENCE_S
    goes_on.set()
    late.result(PATIENCE_S)
    wait_for(lambda: engine.progress().steps == 2)
    assert engine.progress().longest_s >= asked.longest_s


def test_a_group_that_a_sleep_has_overtaken_begins_after_the_update(
    engine: EngineThread, fake: FakeEngine
) -> None:
    engine.sleep()
    early, given_up = (engine.submit(prompt(name), group_size=1) for name in ("early", "late"))
    given_up.cancel()
    bad = engine.submit(prompt("long"), group_size=1)
    engine.begin_update()
    assert engine.stats()["groups"] == 0 and not early.done()
    engine.finish_update(1)
    assert early.result(PATIENCE_S).prompt.prompt_id == "early"
    with pytest.raises(ValueError, match="does not fit"):
        bad.result(PATIENCE_S)
    assert fake.events == ["asleep", "begin", "finish", "abort 2", "early"]


def test_after_an_update_that_failed_groups_are_refused(engine: EngineThread) -> None:
    engine.begin_update()
    waiting = engine.submit(prompt("a"), group_size=1)
    with pytest.raises(ValueError, match="no such tensor"):
        engine.load_bucket("bad")  # type: ignore[arg-type]
    for future in (waiting, engine.submit(prompt("b"), group_size=1)):
        with pytest.raises(EngineError, match=r"incomplete, .*ValueError: no such tensor"):
            future.result(PATIENCE_S)
    engine.begin_update()
    later = engine.submit(prompt("c"), group_size=1)
    engine.finish_update(1)
    assert later.result(PATIENCE_S).prompt.prompt_id == "c"


def test_a_group_that_waits_for_weights_fails_with_its_engine(fake: FakeEngine) -> None:
    engine = EngineThread(lambda: fake, config())
    engine.sleep()
    future = engine.submit(prompt("a"), group_size=1)
    engine.close()
    with pytest.raises(EngineError, match="stopped"):
        future.result(PATIENCE_S)


def test_a_cancelled_group_is_aborted(engine: EngineThread, fake: FakeEngine) -> None:
    fake.go.clear()
    first, second = (engine.submit(prompt(name), group_size=2) for name in "ab")
    while engine.stats()["groups"] < 2:
        pass
    assert first.cancel()
    assert engine.stats()["groups"] == 1
    fake.go.set()
    assert second.result(PATIENCE_S).prompt.prompt_id == "b"
    assert fake.events == ["abort 0", "b"]


def test_a_refused_prompt_fails_alone_and_leaves_nothing(
    engine: EngineThread, fake: FakeEngine
) -> None:
    bad, good = (engine.submit(prompt(name), group_size=2) for name in ("long", "a"))
    with pytest.raises(ValueError, match="prompt long: does not fit"):
        bad.result(PATIENCE_S)
    assert good.result(PATIENCE_S).prompt.prompt_id == "a"
    assert engine.stats()["groups"] == 0 and not fake.jobs


def test_running_groups_pause_for_an_update_and_go_on(
    engine: EngineThread, fake: FakeEngine
) -> None:
    fake.go.clear()
    nearly, later = (engine.submit(prompt(name), group_size=2) for name in ("nearly", "later"))
    engine.begin_update()
    assert nearly.result(PATIENCE_S).prompt.prompt_id == "nearly"
    fake.go.set()
    engine.load_bucket("x")  # type: ignore[arg-type]
    assert not later.done(), "sampled with half of the weights"
    engine.finish_update(3)
    later.result(PATIENCE_S)
    assert fake.events == ["begin", "load x", "finish", "later"]


def test_running_groups_pause_while_the_engine_sleeps(
    engine: EngineThread, fake: FakeEngine
) -> None:
    fake.go.clear()
    nearly, later = (engine.submit(prompt(name), group_size=2) for name in ("nearly", "later"))
    engine.sleep()
    assert nearly.result(PATIENCE_S).prompt.prompt_id == "nearly"
    fake.go.set()
    assert engine.stats()["version"] == 0 and not later.done()
    update(engine, 1)
    later.result(PATIENCE_S)
    assert fake.events == ["asleep", "begin", "finish", "later"]


def test_a_group_is_cut_at_its_deadline(fake: FakeEngine) -> None:
    engine = EngineThread(lambda: fake, config(timeout_s=0.05))
    fake.go.clear()
    early = engine.submit(prompt("early"), group_size=2)
    assert not early.result(PATIENCE_S).dropped
    assert fake.events == ["cut early", "early"]
    engine.close()


def test_what_cannot_even_be_cut_is_given_up(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.rollout.engine.thread.CUT_S", 0.05)
    fake.deaf = True
    engine = EngineThread(lambda: fake, config(timeout_s=0.05))
    fake.go.clear()
    assert engine.submit(prompt("a"), group_size=2).result(PATIENCE_S).dropped == ("late",)
    assert fake.events == ["cut a", "give up a"]
    assert engine.stats()["groups"] == 0
    engine.close()


def test_time_without_weights_does_not_count_towards_the_deadline(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now, monotonic=lambda: now)
    monkeypatch.setattr("keel.rollout.engine.thread.time", clock)
    engine = EngineThread(lambda: fake, config(timeout_s=10.0))
    fake.go.clear()
    future = engine.submit(prompt("a"), group_size=2)
    engine.begin_update()
    now = 100.0
    fake.go.set()
    engine.finish_update(1)
    future.result(PATIENCE_S)
    assert fake.events == ["begin", "finish", "a"], "was cut"
    engine.close()


def test_an_update_can_wait_for_running_groups(draining: EngineThread, fake: FakeEngine) -> None:
    fake.go.clear()
    future = draining.submit(prompt("a"), group_size=2)
    threading.Timer(0.05, fake.go.set).start()
    update(draining, 3, "x", "y")
    assert future.done()
    assert fake.events == ["a", "begin", "load x", "load y", "finish"]
    assert draining.stats()["version"] == 3


def test_an_update_that_cannot_begin_is_given_up(fake: FakeEngine) -> None:
    draining = EngineThread(lambda: fake, config(weight_updates="drain", update_timeout_s=0.05))
    fake.go.clear()
    future = draining.submit(prompt("a"), group_size=2)
    with pytest.raises(TimeoutError, match=r"update_timeout_s\) for running completions to"):
        update(draining, 3)
    fake.go.set()
    future.result(PATIENCE_S)
    draining.close()
    assert fake.version == 0 and "begin" not in fake.events


def test_a_commands_own_timeout_is_passed_on(fake: FakeEngine) -> None:
    cause = TimeoutError("the store did not answer within 12 s")

    def late(_: Bucket) -> None:
        raise cause

    fake.load_bucket = late
    engine = EngineThread(lambda: fake, config())
    with pytest.raises(TimeoutError, match="the store") as raised:
        update(engine, 1, "x")
    assert raised.value is cause
    engine.close()


@pytest.mark.parametrize(
    ("error", "seen", "message"),
    [
        (
            RuntimeError("out of memory"),
            EngineError,
            "the engine broke: RuntimeError: out of memory",
        ),
        (RecordingError("request 7: no mask"), RecordingError, "request 7: no mask"),
    ],
)
def test_when_a_step_fails_everyone_is_told(
    engine: EngineThread,
    fake: FakeEngine,
    error: Exception,
    seen: type[Exception],
    message: str,
) -> None:
    def fail() -> None:
        if len(fake.jobs) == 2:
            raise error

    fake.go.clear()
    fake.fail = fail
    futures = [engine.submit(prompt(name), group_size=2) for name in "ab"]
    for future in futures:
        with pytest.raises(seen, match=message):
            future.result(PATIENCE_S)
    with pytest.raises(seen, match=message):
        engine.submit(prompt("c"), group_size=2).result(PATIENCE_S)
    with pytest.raises(seen, match=message):
        engine.begin_update()


def test_what_stops_the_sampler_from_being_built_is_raised() -> None:
    def build() -> Any:
        raise ValueError("model.path = 'x': not there")

    with pytest.raises(ValueError, match="not there"):
        EngineThread(build, RolloutConfig())


def test_closing_fails_what_is_unfinished(fake: FakeEngine) -> None:
    engine = EngineThread(lambda: fake, RolloutConfig())
    fake.go.clear()
    future = engine.submit(prompt("a"), group_size=2)
    engine.close()
    with pytest.raises(EngineError, match="stopped"):
        future.result(PATIENCE_S)
