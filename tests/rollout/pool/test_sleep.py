"""Engines that share their GPUs with the trainer sleep while it works (`rollout.time_share`)."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from keel.rollout.pool import pool
from keel.rollout.spec import EngineError, Started
from keel.weights.sync import StoreTransfer
from tests.rl.rollouts import prompt
from tests.rollout.pool.fake_engines import FakeEngine, World, done, failed
from tests.waiting import PATIENCE_S, wait_for


def sleepers(**options: Any) -> World:
    world = World(time_share=True, **options)
    world.pool.start()
    return world


def test_engines_sleep_until_they_have_weights() -> None:
    world = sleepers()
    world.pool.sleep().result(timeout=PATIENCE_S)  # they come up asleep
    group = world.pool.submit(prompt("p"), group_size=2)
    world.update_all(0)
    assert group.result(timeout=PATIENCE_S).prompt.prompt_id == "p"
    world.pool.sleep().result(timeout=PATIENCE_S)
    world.pool.sleep().result(timeout=PATIENCE_S)
    world.update_all(1)
    assert [engine.naps for engine in world.lives] == [["woken by 0", "asleep", "woken by 1"]] * 2


def test_nothing_is_sent_to_an_engine_that_sleeps() -> None:
    world = sleepers(engines=1)
    world.update_all(0)
    world.pool.sleep().result(timeout=PATIENCE_S)
    group = world.pool.submit(prompt("p"), group_size=2)
    world.pool.sleep().result(timeout=PATIENCE_S)
    (engine,) = world.lives
    assert not engine.asked and not group.done()
    world.update_all(1)
    group.result(timeout=PATIENCE_S)


def test_sleep_is_over_when_all_have_fallen_asleep() -> None:
    world = sleepers()
    world.update_all(0)
    slow: Future[None] = Future()
    world.sleep = lambda engine: slow if engine.name == "1.0" else done(None)
    resting = world.pool.sleep()
    wait_for(lambda: all("asleep" in engine.naps for engine in world.lives))
    assert not resting.done()
    slow.set_result(None)
    resting.result(timeout=PATIENCE_S)


def test_the_trainer_waits_for_an_engine_that_starts_in_its_memory() -> None:
    """Elsewhere it does not: test_pool.py."""
    world = sleepers(answer=lambda engine, name: None)
    world.update_all(0)
    world.pool.submit(prompt("p"), group_size=2)
    coming: Future[Started] = Future()
    wait_for(lambda: world.lives[0].asked)
    world.start = lambda engine: coming
    world.lives[0].die()
    wait_for(lambda: world.names() == ["0.0", "1.0", "0.1"])
    updated = world.pool.update(1, StoreTransfer(1, []))
    wait_for(lambda: "woken by 1" in world.lives[1].naps)
    assert not updated.done()
    coming.set_result(Started(1))
    updated.result(timeout=PATIENCE_S)
    world.pool.shutdown()


def test_an_engine_that_does_not_fall_asleep_is_replaced() -> None:
    world = sleepers(engines=1)
    world.update_all(0)
    never: Future[None] = Future()
    world.sleep = lambda engine: never
    world.pool._fleet.update_s = 0.05
    world.pool.sleep().result(timeout=PATIENCE_S)
    assert world.names() == ["0.0", "0.1"] and world.lives[0].killed
    world.pool._fleet.update_s = PATIENCE_S
    world.update_all(1)
    assert world.lives[1].naps == ["woken by 1"]


def test_an_engine_that_dies_as_it_samples_is_woken_with_the_weights_of_the_others() -> None:
    def answer(engine: FakeEngine, name: str) -> None:
        if engine.name == "0.0":
            engine.die()
        else:
            engine.finish(name)

    world = sleepers(engines=1, answer=answer)
    world.update_all(3)
    group = world.pool.submit(prompt("p"), group_size=2)
    assert group.result(timeout=PATIENCE_S).prompt.prompt_id == "p"
    assert world.lives[1].naps == ["woken by 3"]


def test_an_engine_that_starts_again_while_the_trainer_works_sleeps_on() -> None:
    world = sleepers(engines=1)
    world.update_all(0)
    start: Future[int] = Future()
    world.start = lambda engine: start
    world.sleep = lambda engine: _died()
    resting = world.pool.sleep()
    wait_for(lambda: len(world.lives) == 2)
    assert not resting.done()
    start.set_result(Started(1))
    resting.result(timeout=PATIENCE_S)
    assert world.lives[1].naps == []


def test_engines_that_are_taking_weights_sleep_after_that() -> None:
    """A run that a scheduler ends then has a checkpoint to write."""
    world = sleepers(engines=1)
    taken: Future[int] = Future()
    world.update = lambda engine, version, buckets: taken  # type: ignore[method-assign]
    updated = world.pool.update(1, StoreTransfer(1, []))
    resting = world.pool.sleep()
    wait_for(lambda: world.pool._fleet.slots[0].stage == "loading")
    assert not resting.done()
    taken.set_result(1)
    resting.result(timeout=PATIENCE_S)
    assert updated.done() and world.lives[0].naps == ["woken by 1", "asleep"]
    taken = Future()
    world.pool.update(2, StoreTransfer(2, []))
    resting = world.pool.sleep()
    world.pool.shutdown()
    with pytest.raises(EngineError, match="has been shut down"):
        resting.result(timeout=PATIENCE_S)


def test_engines_that_fail_for_good_leave_their_memory_to_a_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "FREED_S", 0.0)
    world = sleepers()
    world.update_all(0)
    world.update = lambda *_: failed(ValueError("no tensor 'x'"))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no tensor 'x'"):
        world.update_all(1)
    world.pool.sleep().result(timeout=PATIENCE_S)
    assert all(engine.killed for engine in world.lives)
    with pytest.raises(ValueError, match="no tensor 'x'"):
        world.update_all(2)
    world.pool.shutdown()


def test_the_end_of_the_pool_is_the_end_of_waiting_for_sleep() -> None:
    world = sleepers(engines=1)
    world.update_all(0)
    world.sleep = lambda engine: Future()
    resting = world.pool.sleep()
    world.pool.shutdown()
    with pytest.raises(EngineError, match="has been shut down"):
        resting.result(timeout=PATIENCE_S)
    with pytest.raises(EngineError, match="has been shut down"):
        world.pool.sleep().result(timeout=PATIENCE_S)


def _died() -> Future[None]:
    future: Future[None] = Future()
    future.set_exception(EngineError("killed by signal 9"))
    return future
