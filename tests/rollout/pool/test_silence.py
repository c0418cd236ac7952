"""Engines of the pool that say nothing for too long, and those that only seem to."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from keel.configs.schema import RolloutConfig
from keel.rollout.pool import dispatcher as work
from keel.rollout.pool import engine_supervisor as lifecycle
from keel.rollout.pool import pool as pool_module
from keel.rollout.pool.engine_supervisor import MAX_RESTARTS, window_s
from keel.weights.sync import StoreTransfer
from tests.rl.rollouts import prompt
from tests.rollout.pool.fake_engines import FakeEngine, World
from tests.rollout.pool.test_pool import ids
from tests.waiting import PATIENCE_S, wait_for


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_an_engine_that_falls_silent_is_replaced_and_loses_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is alive cuts its groups at their deadline."""

    def answer(engine: FakeEngine, name: str) -> None:
        if engine.name != "0.0" or name == "p2":
            engine.finish(name)

    monkeypatch.setattr(RolloutConfig, "silent_s", property(lambda self: self.timeout_s + 0.1))
    world, said = World(answer=answer, timeout_s=0.05), list[str]()
    world.pool.say = said.append
    groups = world.run(5)
    assert ids(groups) == [f"p{i}" for i in range(5)]
    assert not any(group.dropped for group in groups)
    assert world.names() == ["0.0", "1.0", "0.1"] and world.lives[0].killed
    (reason,) = said
    assert "engine 0 is started again: fell silent: no group of prompt p0 in 0.15 s" in reason


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which engines are silent after 10 s."""
    clock = Clock()
    monkeypatch.setattr(RolloutConfig, "silent_s", 10.0)
    for module in (pool_module, lifecycle, work):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_time_in_which_an_engine_takes_weights_is_not_silence(clock: Clock) -> None:
    world = World(answer=lambda engine, name: None, engines=1)
    taken: Future[int] = Future()
    world.update = lambda engine, version, buckets: taken  # type: ignore[method-assign]
    world.pool.start()
    world.pool.submit(prompt("p"), group_size=2)
    wait_for(lambda: "p" in world.lives[0].asked)
    clock.now += 9
    updated = world.pool.update(1, StoreTransfer(1, []))
    wait_for(lambda: world.lives[0].naps)
    clock.now += 100
    taken.set_result(1)
    updated.result(timeout=PATIENCE_S)
    clock.now += 9
    world.pool.submit(prompt("q"), group_size=2)
    wait_for(lambda: "q" in world.lives[0].asked)
    assert world.names() == ["0.0"]
    clock.now += 2
    world.pool.submit(prompt("r"), group_size=2)
    wait_for(lambda: world.names() == ["0.0", "0.1"])
    world.pool.shutdown()


def test_a_group_may_wait_for_an_engine_for_longer_than_it_may_take(clock: Clock) -> None:
    world = World(answer=lambda engine, name: None, engines=1, max_num_seqs=2)
    world.pool.start()
    groups = [world.pool.submit(prompt(f"p{i}"), group_size=2) for i in range(6)]
    for index, group in enumerate(groups):
        wait_for(lambda name=f"p{index}": name in world.lives[0].asked)
        clock.now += 9
        world.lives[0].finish(f"p{index}")
        assert not group.result(timeout=PATIENCE_S).dropped
    assert world.names() == ["0.0"]


def test_an_engine_that_is_slow_in_a_step_is_not_silent() -> None:
    """Cut one step late, ended with the next: two steps of up to update_timeout_s or a minute."""
    for options in ({}, {"timeout_s": 3600.0}, {"update_timeout_s": 1.0}):
        config = RolloutConfig(**options)
        assert config.silent_s >= config.timeout_s + 2 * 60.0
        assert config.silent_s >= config.timeout_s + config.update_timeout_s


def test_silences_add_up_however_long_each_takes() -> None:
    for timeout_s in (600.0, 3600.0, 36_000.0):
        config = RolloutConfig(timeout_s=timeout_s)
        assert window_s(config, 600.0) > MAX_RESTARTS * (config.silent_s + 600.0)
