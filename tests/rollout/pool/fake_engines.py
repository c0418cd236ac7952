"""Engines of the pool's tests, which do as they are told, and the world that makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from typing import Any, cast

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import Group, Prompt
from keel.rollout.pool.pool import RolloutPool
from keel.rollout.spec import EngineError, Progress, Started
from keel.weights.sync import StoreTransfer
from tests.rl.rollouts import prompt
from tests.waiting import PATIENCE_S

Answer = Callable[["FakeEngine", str], None]


class FakeEngine:
    """Answers at once, unless told what to do with a prompt."""

    def __init__(self, index: int, life: int, world: World) -> None:
        self.name, self.world = f"{index}.{life}", world
        self.version, self.killed = 0, False
        self.asked: dict[str, Future[Group]] = {}
        self.records: list[bool] = []
        self.draws: list[tuple[str, int]] = []
        self.naps: list[str] = []
        self.turns: list[str] = []

    def ready(self) -> Future[Started]:
        return self.world.start(self)

    def generate(
        self, prompt: Prompt, *, group_size: int, sampling: SamplingConfig, record: bool, draw: int
    ) -> Future[Group]:
        self.draws.append((prompt.prompt_id, draw))
        future: Future[Group] = Future()
        self.asked[prompt.prompt_id] = future
        self.records.append(record)
        self.world.answer(self, prompt.prompt_id)
        return future

    def turn(
        self, request: TurnRequest, *, sampling: SamplingConfig, record: bool
    ) -> Future[TurnResult]:
        self.turns.append(request.conversation)
        self.records.append(record)
        future: Future[TurnResult] = Future()
        self.asked[request.conversation] = cast("Future[Any]", future)
        self.world.answer(self, request.conversation)
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

    def progress(self) -> Future[Progress]:
        return self.world.progress(self)

    def kill(self) -> None:
        self.killed = True


class World:
    """Makes engines and decides what becomes of them."""

    def __init__(self, answer: Answer | None = None, **config: Any) -> None:
        self.answer: Answer = answer or (lambda engine, name: engine.finish(name))
        self.start: Callable[[FakeEngine], Future[Started]] = lambda engine: done(Started(1))
        self.progress: Callable[[FakeEngine], Future[Progress]] = lambda engine: done(Progress())
        self.sleep: Callable[[FakeEngine], Future[None]] = lambda engine: done(None)
        self.lives: list[FakeEngine] = []
        defaults = {"engines": 2, "max_num_seqs": 4}
        defaults |= {"timeout_s": PATIENCE_S, "update_timeout_s": PATIENCE_S}
        self.config = RolloutConfig(**{**defaults, **config})
        self.pool = RolloutPool(self.config, self.build, startup_timeout_s=PATIENCE_S)

    def build(self, index: int) -> FakeEngine:
        life = sum(engine.name.startswith(f"{index}.") for engine in self.lives)
        self.lives.append(FakeEngine(index, life, self))
        return self.lives[-1]

    def update(self, engine: FakeEngine, version: int, buckets: Sequence[Any]) -> Future[int]:
        engine.version = version
        return done(version)

    def update_all(self, version: int, buckets: Sequence[Any] = ()) -> None:
        self.pool.update(version, StoreTransfer(version, buckets)).result(timeout=PATIENCE_S)

    def names(self) -> list[str]:
        return [engine.name for engine in self.lives]

    def run(self, count: int, **options: Any) -> list[Group]:
        if not self.lives:
            self.pool.start()
        prompts = [prompt(f"p{i}") for i in range(count)]
        return list(generate(self.pool, prompts, group_size=2, **options))


def generate(pool: RolloutPool, prompts: Sequence[Prompt], **how: Any) -> Iterator[Group]:
    """Groups in the order that they finish. Who closes it has the others given up."""
    groups = [pool.submit(prompt, **how) for prompt in prompts]
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
