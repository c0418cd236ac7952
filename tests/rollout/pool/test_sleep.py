"""Tests engines that share their GPUs with the trainer (`rollout.time_share`)."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from keel.rollout.pool import pool
from keel.rollout.spec import EngineError, EngineStarted
from tests.rl.rollouts import prompt
from tests.rollout.pool.fake_engines import World, dies_once, done, failed, never
from tests.waiting import PATIENCE_S, wait_for


def sleepers(answer: Any = None, **options: Any) -> World:
    """A pool that has loaded the weights of version 0."""
    world = World(answer, time_share=True, **options)
    world.pool.start()
    world.pool.sleep().result(timeout=PATIENCE_S)  # engines come up asleep
    world.update_all(0)
    return world


def sleep(world: World) -> None:
    world.pool.sleep().result(timeout=PATIENCE_S)


def test_sleeping_engines_get_no_requests_until_weights() -> None:
    world = sleepers()
    sleep(world)
    group = world.pool.submit(prompt("p"), group_size=2)
    sleep(world)
    assert not group.done() and not any(engine.asked for engine in world.lives)
    world.update_all(1)
    group.result(timeout=PATIENCE_S)
    assert [engine.naps for engine in world.lives] == [["woken by 0", "asleep", "woken by 1"]] * 2


def test_sleep_resolves_when_all_engines_sleep() -> None:
    world, slow = sleepers(), Future[None]()
    world.sleep = lambda engine: slow if engine.name == "1.0" else done(None)
    asleep = world.pool.sleep()
    wait_for(lambda: all("asleep" in engine.naps for engine in world.lives))
    assert not asleep.done()
    slow.set_result(None)
    asleep.result(timeout=PATIENCE_S)


def test_an_update_waits_for_restarting_engines() -> None:
    """Restarting engines use the memory that the trainer needs next."""
    world = sleepers(never)
    world.pool.submit(prompt("p"), group_size=2)
    start: Future[EngineStarted] = Future()
    wait_for(lambda: world.lives[0].asked)
    world.start = lambda _: start
    world.lives[0].die()
    wait_for(lambda: world.names() == ["0.0", "1.0", "0.1"])
    updated = world.send(1)
    wait_for(lambda: "woken by 1" in world.lives[1].naps)
    assert not updated.done()
    start.set_result(EngineStarted(1))
    updated.result(timeout=PATIENCE_S)


def test_an_engine_that_stays_awake_is_replaced() -> None:
    world = sleepers(engines=1)
    world.sleep = lambda _: Future()
    world.pool._supervisor.update_s = 0.05
    sleep(world)
    assert world.names() == ["0.0", "0.1"] and world.lives[0].killed
    world.pool._supervisor.update_s = PATIENCE_S
    world.update_all(1)
    assert world.lives[1].naps == ["woken by 1"]


def test_a_replacement_wakes_with_current_weights() -> None:
    world = sleepers(dies_once, engines=1)
    assert world.run(1) == ["p0"]
    assert world.lives[1].naps == ["woken by 0"]


def test_a_replacement_stays_asleep_while_the_trainer_works() -> None:
    world, start = sleepers(engines=1), Future[EngineStarted]()
    world.start = lambda _: start
    world.sleep = lambda _: failed(EngineError("killed by signal 9"))
    asleep = world.pool.sleep()
    wait_for(lambda: len(world.lives) == 2)
    assert not asleep.done()
    start.set_result(EngineStarted(1))
    asleep.result(timeout=PATIENCE_S)
    assert world.lives[1].naps == []


def test_loading_engines_sleep_afterwards() -> None:
    world, update = sleepers(engines=1), Future[int]()
    world.update = lambda *_: update
    updated = world.send(1)
    asleep = world.pool.sleep()
    wait_for(lambda: world.pool._supervisor.slots[0].stage == "loading")
    assert not asleep.done()
    update.set_result(1)
    asleep.result(timeout=PATIENCE_S)
    assert updated.done() and world.lives[0].naps[-2:] == ["woken by 1", "asleep"]


def test_engines_that_fail_for_good_free_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "FREED_S", 0.0)
    world = sleepers()
    world.update = lambda *_: failed(ValueError("no tensor 'x'"))
    for version in (1, 2):
        with pytest.raises(ValueError, match="no tensor 'x'"):
            world.update_all(version)
        sleep(world)
    assert all(engine.killed for engine in world.lives)


@pytest.mark.parametrize("stage", ["loading", "going to sleep"])
def test_shutdown_fails_a_pending_sleep(stage: str) -> None:
    world = sleepers(engines=1)
    world.sleep, world.update = lambda _: Future(), lambda *_: Future()
    if stage == "loading":
        world.send(1)
    asleep = world.pool.sleep()
    wait_for(lambda: world.pool._supervisor.slots[0].stage == stage)
    world.pool.shutdown()
    for future in (asleep, world.pool.sleep()):
        with pytest.raises(EngineError):
            future.result(timeout=PATIENCE_S)
