"""The end of a pool: nothing of it is left, whatever it was at."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from keel.rollout.pool.engine_supervisor import Unwanted
from keel.rollout.pool.pool import RolloutPool
from tests.rollout.pool.fake_engines import FakeEngine, World
from tests.waiting import PATIENCE_S


def test_shutdown_ends_all_engines() -> None:
    world = World()
    world.pool.start()
    world.pool.shutdown()
    assert all(engine.killed for engine in world.lives)


@pytest.mark.parametrize("when", ["while one is built", "while they are waited for"])
def test_a_start_does_not_outlive_its_pool(when: str) -> None:
    """As after a signal: nothing comes of what Ray was asked for, once it has been ended."""
    world, reached = World(), threading.Event()
    world.start = lambda engine: Future()
    build = world.build

    def built(index: int) -> FakeEngine:
        engine = build(index)
        if when == "while one is built":
            world.pool.shutdown()  # which does not know this one
        elif index == world.config.engines - 1:
            reached.set()
        return engine

    world.pool = RolloutPool(world.config, built, startup_timeout_s=1000 * PATIENCE_S)
    failures: list[Exception] = []

    def start() -> None:
        try:
            world.pool.start()
        except Unwanted as unwanted:
            failures.append(unwanted)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    if when != "while one is built":
        assert reached.wait(PATIENCE_S)
        world.pool.shutdown()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and failures
    assert world.lives and all(engine.killed for engine in world.lives)
