"""Tests the pool with fake engines: requests, turns, engine deaths, weight updates and sleep."""

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from keel.rl.supervisor import MAX_RESTARTS
from keel.rl.turns import TurnRequest
from keel.rollout.pool import (
    STALL_POLL_S,
    STUCK_S,
    WARN_S,
    _EngineSlot,
    _StallDetector,
)
from keel.rollout.spec import EngineError, EngineProgress
from tests.rl.rollouts import prompt
from tests.rollout.fake_engines import (
    FakeEngine,
    World,
    dies_once,
    done,
    failed,
    generate,
    never,
)
from tests.waiting import PATIENCE_S, wait_for


def started(answer: Any = None, **config: Any) -> World:
    world = World(answer, **config)
    world.pool.start()
    return world


def test_work_is_balanced_and_bounded() -> None:
    world = started(never)
    for index in range(12):
        world.submit(prompt(f"p{index}"), group_size=2)
    wait_for(lambda: sum(len(engine.asked) for engine in world.lives) == 4)
    time.sleep(0.02)
    # Groups of two, four sequences per engine.
    assert [sorted(engine.asked) for engine in world.lives] == [["p0", "p2"], ["p1", "p3"]]


def test_groups_of_a_dead_engine_are_requeued() -> None:
    def answer(engine: FakeEngine, name: str) -> None:
        if engine.name != "0.0":
            engine.finish(name)
        elif len(engine.asked) == 2:
            engine.die()

    world, lines = World(answer), list[str]()
    world.pool.say = lines.append
    assert world.run(6) == [f"p{i}" for i in range(6)]
    assert len(world.lives) == 3 and len(lines) == 1 and "killed by signal 9" in lines[0]
    assert world.lives[0].killed and not world.lives[1].killed


def test_a_restarted_engine_loads_the_latest_weights_first() -> None:
    def answer(engine: FakeEngine, name: str) -> None:
        assert engine.version == 7, "sampled from old weights"
        dies_once(engine, name)

    world = started(answer, engines=1)
    world.update_all(7)
    assert world.run(3) == ["p0", "p1", "p2"]
    assert world.names() == ["0.0", "0.1"] and world.lives[1].version == 7


@pytest.mark.parametrize("when", ["before the update", "during the update"])
def test_other_engines_continue_during_a_restart(when: str) -> None:
    def answer(engine: FakeEngine, name: str) -> None:
        assert engine.name != "0.1" or engine.version == 8, "sampled from old weights"
        if engine.name != "0.0":
            engine.finish(name)

    world, start, update = started(answer), Future[tuple[str, ...]](), Future[int]()
    group = world.submit(prompt("p"), group_size=2)
    wait_for(lambda: world.lives[0].asked)
    world.start = lambda _: start
    world.update = lambda engine, *args: (
        update if engine.name == "0.0" else World.load(engine, *args)
    )
    if when == "before the update":
        world.lives[0].die()
        wait_for(lambda: len(world.lives) == 3)
    updated = world.send(7)
    wait_for(lambda: world.lives[1].naps)
    if when == "during the update":
        assert not updated.done()
        update.set_exception(EngineError("killed by signal 9"))
    updated.result(timeout=PATIENCE_S)
    assert group.result(timeout=PATIENCE_S).prompt.prompt_id == "p"
    world.update_all(8)
    assert not start.done() and world.lives[1].version == 8 and not world.lives[2].naps
    start.set_result(())
    wait_for(lambda: world.lives[2].naps)
    assert world.run(4) == [f"p{i}" for i in range(4)]


def test_too_many_restarts_end_the_run() -> None:
    world = World(lambda engine, name: engine.die(), engines=1)
    with pytest.raises(EngineError, match="killed by signal 9"):
        world.run(1)
    assert len(world.lives) == MAX_RESTARTS + 1


def test_an_engine_late_with_weights_is_replaced() -> None:
    world = started(update_timeout_s=0.05)
    stuck: Future[int] = Future()
    world.update = lambda engine, *args: (
        stuck if engine.name == "1.0" else World.load(engine, *args)
    )
    world.update_all(3)
    assert world.names() == ["0.0", "1.0", "1.1"] and world.lives[1].killed
    wait_for(lambda: [engine.version for engine in world.lives if not engine.killed] == [3, 3])


def test_nothing_is_sent_to_a_loading_engine() -> None:
    world, update = started(engines=1), Future[int]()
    world.update = lambda *_: update
    updated = world.send(1)
    group = world.submit(prompt("p"), group_size=2)
    with pytest.raises(RuntimeError, match="version 1"):
        world.send(2)
    time.sleep(0.05)
    assert not group.done() and not world.lives[0].asked
    update.set_result(1)
    updated.result(timeout=PATIENCE_S)
    group.result(timeout=PATIENCE_S)


def test_repeated_prompts_get_different_draws() -> None:
    world = started(engines=1)
    for version in (1, 2):
        list(generate(world, [prompt("p"), prompt("q"), prompt("p")], group_size=2))
        world.update_all(version)
    assert world.lives[0].draws == [("p", 0), ("q", 0), ("p", 1)] * 2


def test_queued_prompts_keep_their_draw() -> None:
    world = started(never, engines=1, max_num_seqs=2)
    engine = world.lives[0]
    world.submit(prompt("q"), group_size=2)
    first = world.submit(prompt("p"), group_size=2)  # waits: the engine is full
    wait_for(lambda: "q" in engine.asked)
    world.update_all(1)
    engine.finish("q")
    wait_for(lambda: "p" in engine.asked)
    engine.finish("p")
    first.result(timeout=PATIENCE_S)
    world.submit(prompt("p"), group_size=2)
    wait_for(lambda: len(engine.draws) == 3)
    assert engine.draws == [("q", 0), ("p", 0), ("p", 1)]  # both of p from weights 1


def test_shutdown_kills_engines_and_fails_requests() -> None:
    world = started(never, engines=1)
    group = world.submit(prompt("p"), group_size=2)
    world.pool.shutdown()
    assert world.lives[0].killed
    for late in (group, world.submit(prompt("q"), group_size=2), world.send(1)):
        with pytest.raises(EngineError):
            late.result(timeout=PATIENCE_S)


# Turns of conversations.

OPEN = "stays open"


def request(conversation: str) -> TurnRequest:
    ids = np.array([1, 2], np.int32)
    return TurnRequest(conversation=conversation, token_ids_T=ids, max_tokens=8, seed=0)


def finish_closed(engine: FakeEngine, name: str) -> None:
    if OPEN not in name:
        engine.finish(name)


def turn(world: World, name: str) -> Future[Any]:
    return world.pool.turn(request(name), sampling=world.config.sampling)


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
    world = started(finish_closed, max_num_seqs=1)
    turn(world, "c").result(PATIENCE_S)
    home, other = world.lives
    turn(world, OPEN)
    wait_for(lambda: home.turns == ["c", OPEN])
    turn(world, "c").result(PATIENCE_S)
    home.finish(OPEN)
    turn(world, "c").result(PATIENCE_S)
    assert other.turns == ["c", "c"], "it returned to an engine without its prefix"


def test_a_cancelled_turn_frees_its_place() -> None:
    world = started(finish_closed, engines=1, max_num_seqs=1)
    held = turn(world, OPEN)
    wait_for(lambda: world.lives[0].turns == [OPEN])
    waiting, gone = turn(world, "b"), turn(world, "g")
    gone.cancel()
    held.cancel()
    waiting.result(PATIENCE_S)
    assert world.lives[0].asked[OPEN].cancelled() and world.lives[0].turns == [OPEN, "b"]


# Engines that share their GPUs with the trainer (`rollout.time_share`).


def sleepers(answer: Any = None, **options: Any) -> World:
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
    group = world.submit(prompt("p"), group_size=2)
    sleep(world)
    assert not group.done() and not any(engine.asked for engine in world.lives)
    world.update_all(1)
    group.result(timeout=PATIENCE_S)
    assert [engine.naps for engine in world.lives] == [["woken by 0", "asleep", "woken by 1"]] * 2


class Watched:
    """A slot with a scripted engine, which is polled every `STALL_POLL_S` seconds."""

    def __init__(self, steps: int = 1, longest_s: float = 0.5, requests: int = 2) -> None:
        self.now = 0.0
        self.answer: Future[Any] = done(EngineProgress(steps, longest_s, requests))
        self.world, self.warnings = World(engines=1), list[float]()
        self.world.progress = lambda _: self.answer
        self.slot = _EngineSlot(0, self.world.build(0), "ready", None, 0.0, sequences=8)
        self.detector = _StallDetector(lambda: self.now)

    def run(self, seconds: float, *, steady: bool = False) -> float | None:
        begin = self.now
        while self.now < begin + seconds:
            if steady:
                self.answer = done(EngineProgress(int(self.now / STALL_POLL_S) // 3, 0.5, 2))
            self.now += STALL_POLL_S
            warn = lambda _: self.warnings.append(self.now - begin)  # noqa: E731
            for slot, error in self.detector.poll([self.slot], warn):
                assert slot is self.slot and isinstance(error, EngineError)
                return self.now - begin
        return None


@pytest.mark.parametrize(
    ("longest_s", "warn_s", "stuck_s"), [(0.5, WARN_S, STUCK_S), (30.0, 120.0, 300.0)]
)
def test_a_stalled_engine_is_warned_about_then_replaced(
    longest_s: float, warn_s: float, stuck_s: float
) -> None:
    watched = Watched(steps=7, longest_s=longest_s)
    stuck = watched.run(600)
    assert stuck is not None and stuck_s <= stuck <= stuck_s + 2 * STALL_POLL_S
    (warned,) = watched.warnings
    assert warn_s <= warned <= warn_s + 2 * STALL_POLL_S


def test_slow_progress_is_not_a_stall() -> None:
    watched = Watched()
    assert watched.run(1000, steady=True) is None and not watched.warnings


def test_time_without_a_running_step_does_not_count() -> None:
    assert Watched(steps=0).run(10_000) is None  # the first step may compile
    assert Watched(requests=0).run(10_000) is None  # results are on their way
    for name, value in (("stage", "loading"), ("stage", "asleep"), ("sequences", 0)):
        watched = Watched()
        assert watched.run(WARN_S) is None
        setattr(watched.slot, name, value)
        assert watched.run(10_000) is None
        watched.slot.stage, watched.slot.sequences = "ready", 8
        assert watched.run(STUCK_S - STALL_POLL_S) is None


def test_a_suspended_driver_does_not_count() -> None:
    watched = Watched()
    assert watched.run(10) is None
    watched.now += 3600
    assert watched.run(STUCK_S - 6 * STALL_POLL_S) is None


def test_dead_and_late_engines_raise_engine_errors() -> None:
    from ray.exceptions import ActorDiedError, RayTaskError  # noqa: PLC0415

    from keel.rollout.engine.worker import as_future, with_engine_errors  # noqa: PLC0415

    wrong = ValueError("no tensor 'x'")
    for raised, cause, kind in (
        (ActorDiedError(), ActorDiedError(), EngineError),
        (RayTaskError("update", "", TimeoutError()), TimeoutError(), EngineError),
        (RayTaskError("update", "", wrong), wrong, ValueError),
    ):
        reference: Any = SimpleNamespace(future=lambda raised=raised: failed(raised))
        for future in (as_future(reference), with_engine_errors(failed(cause))):
            assert isinstance(future.exception(timeout=300), kind)
