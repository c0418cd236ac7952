"""Orders that an update has overtaken on its way to an engine's thread, when it then fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, cast

import pytest

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.types import Prompt
from keel.rollout.engine.thread import EngineThread
from keel.rollout.pool.pool import RolloutPool
from keel.rollout.pool.ray_engines import _as_engine_error
from keel.rollout.spec import Progress, Started
from keel.weights.sync import StoreTransfer
from tests.rl.rollouts import prompt
from tests.rollout.engine.test_thread import FakeEngine, update
from tests.rollout.pool.fake_engines import done
from tests.waiting import PATIENCE_S, wait_for

LATE = "8 MiB of weights did not get through in 20 s (rollout.update_timeout_s)"
CONFIG = RolloutConfig(
    sampling=SamplingConfig(max_tokens=8), timeout_s=PATIENCE_S, update_timeout_s=PATIENCE_S
)


class ThreadEngine:
    """A real thread. What the driver asks of the first one, and what that one says of its update,
    arrive when the test says so."""

    def __init__(self, *, fails: bool) -> None:
        self.fake, self.fails = FakeEngine(), fails
        if fails:
            self.fake.load_bucket = self._late
        self.thread = EngineThread(lambda: self.fake, CONFIG)
        self.asked: list[Callable[[], None]] = []
        self.failed: list[Callable[[], None]] = []

    @staticmethod
    def _late(_: Any) -> None:
        raise TimeoutError(LATE)

    def ready(self) -> Future[Started]:
        return done(Started(1))

    def generate(self, prompt: Prompt, *, draw: int, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def arrive() -> None:
            _pass_on(self.thread.submit(prompt, **options), future)

        self.asked.append(arrive)
        if not self.fails:
            arrive()
        return future

    def update(self, version: int, buckets: Any) -> Future[int]:
        future: Future[int] = Future()

        def replace() -> None:
            try:
                update(self.thread, version, *buckets)
                future.set_result(version)
            except TimeoutError as error:
                raised = _as_engine_error(error)
                self.failed.append(lambda: future.set_exception(raised))

        threading.Thread(target=replace).start()
        return future

    def progress(self) -> Future[Progress]:
        return done(Progress())

    def kill(self) -> None: ...


def _pass_on(asked: Future[Any], future: Future[Any]) -> None:
    def arrived(asked: Future[Any]) -> None:
        if (error := asked.exception()) is not None:
            future.set_exception(_as_engine_error(error))
        else:
            future.set_result(asked.result())

    asked.add_done_callback(arrived)


@pytest.fixture
def engines() -> Iterator[list[ThreadEngine]]:
    made: list[ThreadEngine] = []
    yield made
    for engine in made:
        engine.thread.close()


@pytest.mark.parametrize("order_first", [True, False])
def test_an_order_overtaken_by_an_update_that_fails_is_sampled_by_the_replacement(
    engines: list[ThreadEngine], order_first: bool
) -> None:
    def build(_: int) -> Any:
        engines.append(ThreadEngine(fails=not engines))
        return cast(Any, engines[-1])

    pool = RolloutPool(CONFIG, build, startup_timeout_s=PATIENCE_S)
    said: list[str] = []
    pool.say = said.append
    pool.start()
    group = pool.submit(prompt("late"), group_size=1)
    wait_for(lambda: engines[0].asked)
    updated = pool.update(1, StoreTransfer(1, ["bucket"]))
    wait_for(lambda: engines[0].failed)
    first, second = engines[0].asked[0], engines[0].failed[0]
    for arrive in (first, second) if order_first else (second, first):
        arrive()
    updated.result(PATIENCE_S)
    assert group.result(PATIENCE_S).prompt.prompt_id == "late"
    assert len(engines) == 2 and engines[1].fake.version == 1
    assert len(said) == 1 and LATE in said[0]
    pool.shutdown()
