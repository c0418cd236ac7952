"""Tests engines that share their GPUs with the trainer (`rollout.time_share`)."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from keel.rollout.spec import EngineStarted
from tests.rl.rollouts import prompt
from tests.rollout.pool.fake_engines import World, never
from tests.waiting import PATIENCE_S, wait_for


def sleepers(answer: Any = None, **options: Any) -> World:
    """A pool that has loaded weights of version 0."""
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


def test_an_update_waits_for_restarting_engines() -> None:
    """Restarting engines use memory that the trainer needs next."""
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
