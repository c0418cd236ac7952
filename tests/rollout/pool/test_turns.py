"""Turns of conversations in the pool: where they go, and what an engine that dies costs."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from keel.rl.turns import TurnRequest
from tests.rl.rollouts import prompt
from tests.rollout.pool.fake_engines import FakeEngine, World
from tests.waiting import PATIENCE_S, wait_for

OPEN = "stays open"


def request(conversation: str, max_tokens: int = 8) -> TurnRequest:
    ids = np.array([1, 2], np.int32)
    return TurnRequest(conversation=conversation, token_ids_T=ids, max_tokens=max_tokens, seed=0)


def finish_some(engine: FakeEngine, name: str) -> None:
    if OPEN not in name:
        engine.finish(name)


def turn(world: World, name: str) -> Future[Any]:
    return world.pool.turn(request(name))


def test_a_conversation_goes_back_to_the_engine_that_has_its_prefix() -> None:
    world = World(lambda engine, name: None)
    world.pool.start()
    names = [f"c{i}" for i in range(6)]
    begun = [turn(world, name) for name in names]
    wait_for(lambda: sum(len(engine.turns) for engine in world.lives) == 6)
    world.answer = lambda engine, name: engine.finish(name)
    for engine in world.lives:
        for name in engine.turns:
            engine.finish(name)
    for future in begun:
        future.result(PATIENCE_S)
    for _ in range(4):
        for future in [turn(world, name) for name in names]:
            future.result(PATIENCE_S)
    first, second = (set(engine.turns) for engine in world.lives)
    assert first | second == set(names) and not first & second and first and second
    world.pool.shutdown()


def test_it_waits_there_for_room() -> None:
    world = World(finish_some, max_num_seqs=2)
    world.pool.start()
    turn(world, "c").result(PATIENCE_S)
    home, other = world.lives
    held = [f"{OPEN} {i}" for i in range(3)]
    for count, name in enumerate(held):
        turn(world, name)
        wait_for(lambda count=count: len(home.turns) + len(other.turns) == count + 2)
    assert home.turns == ["c", held[0], held[2]]  # full, and the other half full
    waits = turn(world, "c")
    turn(world, "e").result(PATIENCE_S)  # has no home, and does not wait behind c
    assert other.turns == [held[1], "e"] and not waits.done()
    home.finish(held[0])
    waits.result(PATIENCE_S)
    assert home.turns[-1] == "c"
    world.pool.shutdown()


def test_it_moves_where_another_engine_has_little_to_do() -> None:
    world = World(finish_some, max_num_seqs=1)
    world.pool.start()
    turn(world, "c").result(PATIENCE_S)
    home, other = world.lives
    turn(world, OPEN)
    wait_for(lambda: home.turns == ["c", OPEN])
    turn(world, "c").result(PATIENCE_S)
    home.finish(OPEN)
    turn(world, "c").result(PATIENCE_S)
    assert other.turns == ["c", "c"], "it went back to where its prefix is no longer"
    world.pool.shutdown()


def test_a_dead_engine_costs_a_turn_and_the_conversation_goes_on() -> None:
    world = World(finish_some)
    world.pool.start()
    for _ in range(2):
        turn(world, "c").result(PATIENCE_S)
    (home,) = [engine for engine in world.lives if engine.turns]
    home.world.answer = lambda engine, name: engine.die() if engine is home else engine.finish(name)
    turn(world, "c").result(PATIENCE_S)
    assert home.killed and world.pool.restarts == 1
    assert sum(engine.turns.count("c") for engine in world.lives) == 4
    world.pool.shutdown()


def test_turns_of_evaluation_come_first_and_are_not_recorded() -> None:
    world = World(finish_some, engines=1, max_num_seqs=1)
    world.pool.start()
    held = turn(world, OPEN)
    wait_for(lambda: world.lives[0].turns == [OPEN])
    training = turn(world, "t")
    measured = world.pool.turn(request("e"), purpose="eval")
    world.lives[0].finish(OPEN)
    for future in (held, training, measured):
        future.result(PATIENCE_S)
    assert world.lives[0].turns == [OPEN, "e", "t"]
    assert world.lives[0].records == [True, False, True]
    world.pool.shutdown()


def test_a_turn_that_is_given_up_frees_its_place() -> None:
    world = World(finish_some, engines=1, max_num_seqs=1)
    world.pool.start()
    held = turn(world, OPEN)
    wait_for(lambda: world.lives[0].turns == [OPEN])
    waits, gone = turn(world, "b"), turn(world, "g")
    gone.cancel()
    held.cancel()
    waits.result(PATIENCE_S)
    assert world.lives[0].asked[OPEN].cancelled() and world.lives[0].turns == [OPEN, "b"]
    world.pool.shutdown()


def test_groups_and_turns_share_the_engines() -> None:
    world = World()
    world.pool.start()
    group = world.pool.submit(prompt("p"), group_size=2)
    turn(world, "c").result(PATIENCE_S)
    assert group.result(PATIENCE_S).prompt.prompt_id == "p"
    world.pool.shutdown()
    with pytest.raises(Exception, match="shut down"):
        turn(world, "c").result(PATIENCE_S)
