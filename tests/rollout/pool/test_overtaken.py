"""Tests requests that are still on the way to an engine's thread when a weight update fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.types import Prompt
from keel.rollout.engine.thread import EngineThread
from keel.rollout.pool.pool import RolloutPool
from keel.rollout.pool.ray_engines import as_engine_error, with_engine_errors
from keel.rollout.spec import EngineProgress, EngineStarted
from keel.weights.sync import StoreTransfer
from tests.rl.rollouts import prompt
from tests.rollout.engine.test_thread import FakeEngine, update
from tests.rollout.pool.fake_engines import done
from tests.waiting import PATIENCE_S, wait_for

LATE = "8 MiB of weights did not arrive in 20 s"
CONFIG = RolloutConfig(
    sampling=SamplingConfig(max_tokens=8), timeout_s=PATIENCE_S, update_timeout_s=PATIENCE_S
)


class ThreadEngine:
    """Engine with a real thread. If `fails` is set, the test decides when the results of its group
    and its update arrive."""

    def __init__(self, *, fails: bool) -> None:
        self.fake, self.fails = FakeEngine(), fails
        if fails:
            self.fake.load_bucket = self._late
        self.thread = EngineThread(lambda: self.fake, CONFIG)
        self.groups: list[Callable[[], None]] = []
        self.errors: list[Callable[[], None]] = []

    @staticmethod
    def _late(_: Any) -> None:
        raise TimeoutError(LATE)

    def ready(self) -> Future[EngineStarted]:
        return done(EngineStarted(1))

    def generate(self, prompt: Prompt, *, draw: int, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def settle(sent: Future[Any]) -> None:
            if (error := sent.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(sent.result())

        def arrive() -> None:
            sent = with_engine_errors(self.thread.submit(prompt, **options))
            sent.add_done_callback(settle)

        self.groups.append(arrive)
        if not self.fails:
            arrive()
        return future

    def update(self, version: int, buckets: Any) -> Future[int]:
        future: Future[int] = Future()

        def load() -> None:
            try:
                update(self.thread, version, *buckets)
                future.set_result(version)
            except TimeoutError as error:
                raised = as_engine_error(error)
                self.errors.append(lambda: future.set_exception(raised))

        threading.Thread(target=load).start()
        return future

    def progress(self) -> Future[EngineProgress]:
        return done(EngineProgress())

    def kill(self) -> None: ...


@pytest.fixture
def engines() -> Iterator[list[ThreadEngine]]:
    built: list[ThreadEngine] = []
    yield built
    for engine in built:
        engine.thread.close()


@pytest.mark.parametrize("request_first", [True, False])
def test_the_replacement_samples_an_overtaken_request(
    engines: list[ThreadEngine], request_first: bool
) -> None:
    def build(_: int) -> Any:
        engines.append(ThreadEngine(fails=not engines))
        return engines[-1]

    pool = RolloutPool(CONFIG, build, startup_timeout_s=PATIENCE_S)
    lines: list[str] = []
    pool.say = lines.append
    pool.start()
    group = pool.submit(prompt("late"), group_size=1)
    wait_for(lambda: engines[0].groups)
    updated = pool.update(1, StoreTransfer(1, ["bucket"]))
    wait_for(lambda: engines[0].errors)
    first, second = engines[0].groups[0], engines[0].errors[0]
    for arrive in (first, second) if request_first else (second, first):
        arrive()
    updated.result(PATIENCE_S)
    assert group.result(PATIENCE_S).prompt.prompt_id == "late"
    assert len(engines) == 2 and engines[1].fake.version == 1
    assert len(lines) == 1 and LATE in lines[0]
    pool.shutdown()
