"""Tests how the pool samples the turns of conversations."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np

from keel.rl.turns import TurnRequest
from tests.rollout.pool.fake_engines import FakeEngine, World, never
from tests.waiting import PATIENCE_S, wait_for

OPEN = "stays open"


def request(conversation: str) -> TurnRequest:
    ids = np.array([1, 2], np.int32)
    return TurnRequest(conversation=conversation, token_ids_T=ids, max_tokens=8, seed=0)


def finish_closed(engine: FakeEngine, name: str) -> None:
    if OPEN not in name:
        engine.finish(name)


def started(answer: Any = finish_closed, **config: Any) -> World:
    world = World(answer, **config)
    world.pool.start()
    return world


def turn(world: World, name: str) -> Future[Any]:
    return world.pool.turn(request(name))


def test_a_conversation_returns_to_its_engine() -> None:
    world = started(never)
    names = [f"c{i}" for i in range(6)]
    first = [turn(world, name) for name in names]
    wait_for(lambda: sum(len(engine.turns) for engine in world.lives) == 6)
    world.answer = finish_closed
    for engine in world.lives:
        for name in engine.turns:
            engine.finish(name)
    for future in first:
        future.result(PATIENCE_S)
    for _ in range(4):
        for future in [turn(world, name) for name in names]:
            future.result(PATIENCE_S)
    one, other = (set(engine.turns) for engine in world.lives)
    assert one | other == set(names) and not one & other and one and other


def test_a_conversation_moves_to_an_idle_engine() -> None:
    world = started(max_num_seqs=1)
    turn(world, "c").result(PATIENCE_S)
    home, other = world.lives
    turn(world, OPEN)
    wait_for(lambda: home.turns == ["c", OPEN])
    turn(world, "c").result(PATIENCE_S)
    home.finish(OPEN)
    turn(world, "c").result(PATIENCE_S)
    assert other.turns == ["c", "c"], "it returned to an engine without its prefix"


def test_a_cancelled_turn_frees_its_place() -> None:
    world = started(engines=1, max_num_seqs=1)
    held = turn(world, OPEN)
    wait_for(lambda: world.lives[0].turns == [OPEN])
    waiting, gone = turn(world, "b"), turn(world, "g")
    gone.cancel()
    held.cancel()
    waiting.result(PATIENCE_S)
    assert world.lives[0].asked[OPEN].cancelled() and world.lives[0].turns == [OPEN, "b"]
