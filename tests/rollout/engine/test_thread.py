"""Tests the engine's thread with a fake engine: batching, cancellation, updates and failures."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.types import Prompt
from keel.rollout.engine.worker import EngineThread
from keel.rollout.spec import EngineError, GroupRequest, RecordingError
from keel.weights.channel import Bucket
from tests.rl.rollouts import prompt
from tests.waiting import PATIENCE_S


class FakeEngine:
    def __init__(self) -> None:
        self.version = 0
        self.jobs: dict[int, Prompt] = {}
        self.updating = False
        self.events: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self.fail: Callable[[], None] = lambda: None
        self.ignores_cuts = False

    @property
    def busy(self) -> bool:
        return bool(self.jobs) and not self.updating

    def add(self, job: int, request: GroupRequest, **options: Any) -> None:
        assert not self.updating, "the weights are incomplete"
        prompt = self.jobs[job] = request.prompt
        if prompt.prompt_id == "long":
            raise ValueError("prompt long: does not fit")

    def step(self) -> Iterator[tuple[int, Any]]:
        self.fail()
        if self.go.wait(timeout=0.01):
            self.events.append("+".join(prompt.prompt_id for prompt in self.jobs.values()))
            for job in list(self.jobs):
                yield job, self._finish(job)

    def _finish(self, job: int, *dropped: str) -> Any:
        return SimpleNamespace(prompt=self.jobs.pop(job), dropped=dropped)

    def abort(self, job: int) -> None:
        if self.jobs.pop(job, None) is not None:
            self.events.append(f"abort {job}")

    def cut(self, job: int) -> list[tuple[int, Any]]:
        event = f"cut {self.jobs[job].prompt_id}"
        again = event in self.events
        self.events.append(event)
        if again:
            return [(job, self._finish(job, "late"))]
        if not self.ignores_cuts:
            self.go.set()
        return []

    def sleep(self) -> list[tuple[int, Any]]:
        return self.pause("asleep")

    def begin_update(self) -> list[tuple[int, Any]]:
        return self.pause("begin")

    def pause(self, event: str) -> list[tuple[int, Any]]:
        """Pause the engine. The tokens in flight complete the group named "nearly"."""
        self.updating = True
        self.events.append(event)
        names = {prompt.prompt_id: job for job, prompt in self.jobs.items()}
        if (job := names.get("nearly")) is None:
            return []
        return [(job, self._finish(job))]

    def load_bucket(self, bucket: Bucket) -> None:
        if bucket == "bad":
            raise ValueError("no such tensor")
        self.events.append(f"load {bucket}")

    def finish_update(self, version: int, checksum: int | None = None) -> None:
        self.version, self.updating = version, False
        self.events.append("finish")


def update(engine: EngineThread, version: int, *buckets: Any) -> None:
    engine.begin_update()
    for bucket in buckets:
        engine.load_bucket(bucket)
    engine.finish_update(version)


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def build(fake: FakeEngine) -> Iterator[Callable[..., EngineThread]]:
    """Return a function that builds an `EngineThread` with the given config changes."""
    engines: list[EngineThread] = []

    def built(**changes: Any) -> EngineThread:
        options = {"update_timeout_s": PATIENCE_S, **changes}
        config = RolloutConfig(sampling=SamplingConfig(max_tokens=8), **options)
        engines.append(EngineThread(lambda: fake, config))
        return engines[-1]

    yield built
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(build: Callable[..., EngineThread]) -> EngineThread:
    return build()


def submit(engine: EngineThread, *names: str) -> Any:
    options: Any = {"sampling": SamplingConfig(), "record": True}
    futures = [engine.sample(GroupRequest(prompt(name), 2), **options) for name in names]
    return futures if len(names) > 1 else futures[0]


def test_groups_submitted_during_sleep_wait(engine: EngineThread, fake: FakeEngine) -> None:
    engine.sleep()
    early, cancelled = submit(engine, "early", "late")
    cancelled.cancel()
    bad = submit(engine, "long")
    engine.begin_update()
    assert engine.progress().requests == 0 and not early.done()
    engine.finish_update(1)
    early.result(PATIENCE_S)
    with pytest.raises(ValueError, match="does not fit"):
        bad.result(PATIENCE_S)
    assert fake.events == ["asleep", "begin", "finish", "abort 2", "early"]


def test_groups_are_refused_after_a_failed_update(engine: EngineThread) -> None:
    engine.begin_update()
    waiting = submit(engine, "a")
    with pytest.raises(ValueError, match="no such tensor"):
        engine.load_bucket("bad")  # type: ignore[arg-type]
    for future in (waiting, submit(engine, "b")):
        with pytest.raises(EngineError, match="no such tensor"):
            future.result(PATIENCE_S)
    engine.begin_update()
    later = submit(engine, "c")
    engine.finish_update(1)
    later.result(PATIENCE_S)


@pytest.mark.parametrize("sleep", [False, True])
def test_running_groups_pause_for_updates(
    engine: EngineThread, fake: FakeEngine, sleep: bool
) -> None:
    fake.go.clear()
    nearly, later = submit(engine, "nearly", "later")
    engine.sleep() if sleep else engine.begin_update()
    nearly.result(PATIENCE_S)
    fake.go.set()
    if sleep:
        engine.begin_update()
    engine.load_bucket("x")  # type: ignore[arg-type]
    assert not later.done(), "sampled with half of the weights"
    engine.finish_update(3)
    later.result(PATIENCE_S)
    begin = ["asleep", "begin"] if sleep else ["begin"]
    assert fake.events == [*begin, "load x", "finish", "later"]


@pytest.mark.parametrize("ignores_cuts", [False, True])
def test_groups_are_cut_at_their_deadline(
    build: Any, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch, ignores_cuts: bool
) -> None:
    monkeypatch.setattr("keel.rollout.engine.worker.CUT_S", 0.05)
    fake.ignores_cuts = ignores_cuts
    engine = build(timeout_s=0.05)
    fake.go.clear()
    group = submit(engine, "a").result(PATIENCE_S)
    assert group.dropped == (("late",) if ignores_cuts else ())
    assert fake.events == ["cut a", "cut a" if ignores_cuts else "a"]
    assert engine.progress().requests == 0


def test_time_without_weights_does_not_count(
    build: Any, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now, monotonic=lambda: now)
    monkeypatch.setattr("keel.rollout.engine.worker.time", clock)
    engine = build(timeout_s=10.0)
    fake.go.clear()
    future = submit(engine, "a")
    engine.begin_update()
    now = 100.0
    fake.go.set()
    engine.finish_update(1)
    future.result(PATIENCE_S)
    assert fake.events == ["begin", "finish", "a"], "was cut"


def test_draining_updates_wait_for_running_groups(build: Any, fake: FakeEngine) -> None:
    draining = build(weight_updates="drain")
    fake.go.clear()
    future = submit(draining, "a")
    threading.Timer(0.05, fake.go.set).start()
    update(draining, 3, "x", "y")
    assert future.done()
    assert fake.events == ["a", "begin", "load x", "load y", "finish"]
    assert fake.version == 3


def test_a_failed_step_fails_every_caller(engine: EngineThread, fake: FakeEngine) -> None:
    def fail() -> None:
        if len(fake.jobs) == 2:
            raise RecordingError("request 7: no mask")

    fake.go.clear()
    fake.fail = fail
    futures = submit(engine, *"ab")
    for wait in (
        *(future.result for future in futures),
        lambda _: submit(engine, "c").result(PATIENCE_S),
        lambda _: engine.begin_update(),
    ):
        with pytest.raises(RecordingError, match="request 7"):
            wait(PATIENCE_S)
