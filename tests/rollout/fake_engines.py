"""Scripted engines for testing the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from typing import Any

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.types import Group, Prompt
from keel.rollout.pool import RolloutPool
from keel.rollout.spec import EngineError, EngineProgress, GroupRequest, SampleRequest
from tests.rl.rollouts import prompt
from tests.waiting import PATIENCE_S

Answer = Callable[["FakeEngine", str], None]


class FakeEngine:
    def __init__(self, index: int, life: int, world: World) -> None:
        self.name, self.world = f"{index}.{life}", world
        self.actor = self
        self.version, self.killed = 0, False
        self.asked: dict[str, Future[Any]] = {}
        self.records: list[bool] = []
        self.draws: list[tuple[str, int]] = []
        self.naps: list[str] = []
        self.turns: list[str] = []

    def ready(self) -> Future[tuple[str, ...]]:
        return self.world.start(self)

    def sample(
        self, request: SampleRequest, *, sampling: SamplingConfig, record: bool
    ) -> Future[Any]:
        if isinstance(request, GroupRequest):
            name = request.prompt.prompt_id
            self.draws.append((name, request.draw))
        else:
            name = request.conversation
            self.turns.append(name)
        self.records.append(record)
        future = self.asked[name] = Future[Any]()
        self.world.answer(self, name)
        return future

    def finish(self, name: str) -> None:
        self.asked[name].set_result(Group(prompt=prompt(name), trajectories=()))

    def die(self) -> None:
        for future in self.asked.values():
            if not future.done():
                future.set_exception(EngineError("killed by signal 9"))

    def update(self, version: int, buckets: Sequence[Any]) -> Future[int]:
        self.naps.append(f"woken by {version}")
        return self.world.update(self, version, buckets)

    def sleep(self) -> Future[None]:
        self.naps.append("asleep")
        return self.world.sleep(self)

    def progress(self) -> Future[EngineProgress]:
        return self.world.progress(self)

    def kill(self) -> None:
        self.killed = True


class World:
    """Builds fake engines and scripts their replies. `FakeEngine.name` has the form
    "index.restarts"."""

    def __init__(self, answer: Answer | None = None, **config: Any) -> None:
        self.answer: Answer = answer or (lambda engine, name: engine.finish(name))
        self.start: Callable[[FakeEngine], Future[Any]] = lambda _: done(())
        self.progress: Callable[[FakeEngine], Future[Any]] = lambda _: done(EngineProgress())
        self.sleep: Callable[[FakeEngine], Future[None]] = lambda _: done(None)
        self.update: Callable[[FakeEngine, int, Any], Future[int]] = self.load
        self.lives: list[FakeEngine] = []
        defaults = {"engines": 2, "max_num_seqs": 4}
        defaults |= {"timeout_s": PATIENCE_S, "update_timeout_s": PATIENCE_S}
        self.config = RolloutConfig(**{**defaults, **config})
        self.pool = RolloutPool(self.config, self.build, startup_timeout_s=PATIENCE_S)

    def build(self, index: int) -> FakeEngine:
        life = sum(engine.name.startswith(f"{index}.") for engine in self.lives)
        self.lives.append(FakeEngine(index, life, self))
        return self.lives[-1]

    @staticmethod
    def load(engine: FakeEngine, version: int, buckets: Any = ()) -> Future[int]:
        engine.version = version
        return done(version)

    def submit(self, prompt: Prompt, **options: Any) -> Future[Group]:
        return self.pool.submit(prompt, **{"sampling": self.config.sampling, **options})

    def send(self, version: int) -> Future[None]:
        return self.pool.update(
            version, lambda engines: {i: each.update(version, []) for i, each in engines.items()}
        )

    def update_all(self, version: int) -> None:
        self.send(version).result(timeout=PATIENCE_S)

    def names(self) -> list[str]:
        return [engine.name for engine in self.lives]

    def run(self, count: int, **options: Any) -> list[str]:
        if not self.lives:
            self.pool.start()
        prompts = [prompt(f"p{i}") for i in range(count)]
        groups = list(generate(self, prompts, group_size=2, **options))
        assert not any(group.dropped for group in groups)
        return sorted(group.prompt.prompt_id for group in groups)


def generate(world: World, prompts: Sequence[Prompt], **options: Any) -> Iterator[Group]:
    groups = [world.submit(prompt, **options) for prompt in prompts]
    try:
        for group in as_completed(groups):
            yield group.result()
    finally:
        for group in groups:
            group.cancel()


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def dies_once(engine: FakeEngine, name: str) -> None:
    engine.die() if engine.name == "0.0" else engine.finish(name)


def never(engine: FakeEngine, name: str) -> None: ...
