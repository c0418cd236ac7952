"""Tests the pool with fake engines: load balancing, engine deaths, weight updates and shutdown."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rollout.pool import dispatcher, engine_supervisor
from keel.rollout.pool import pool as pool_module
from keel.rollout.pool.engine_supervisor import MAX_RESTARTS, StartCancelled, restart_window_s
from keel.rollout.pool.pool import RolloutPool
from keel.rollout.spec import EngineError, EngineStarted
from tests.rl.rollouts import prompt
from tests.rollout.pool.fake_engines import (
    FakeEngine,
    World,
    dies_once,
    done,
    failed,
    generate,
    never,
)
from tests.waiting import PATIENCE_S, wait_for

MEMORY_RACE = "AssertionError: Error in memory profiling. Initial free memory 109 GiB, current 137"


def started(answer: Any = None, **config: Any) -> World:
    world = World(answer, **config)
    world.pool.start()
    return world


def test_work_is_balanced_and_bounded() -> None:
    world = started(never)
    for index in range(12):
        world.pool.submit(prompt(f"p{index}"), group_size=2)
    wait_for(lambda: sum(len(engine.asked) for engine in world.lives) == 4)
    time.sleep(0.02)
    # Groups of two, four sequences per engine.
    assert [sorted(engine.asked) for engine in world.lives] == [["p0", "p2"], ["p1", "p3"]]


def test_the_least_loaded_engine_gets_the_next_group() -> None:
    world = started(lambda engine, name: engine.name == "1.0" and engine.finish(name))
    groups = [world.pool.submit(prompt(f"p{i}"), group_size=2) for i in range(8)]
    wait_for(lambda: sum(group.done() for group in groups) == 6)
    slow, quick = world.lives
    assert len(slow.asked) == 2 and len(quick.asked) == 6


def test_evaluations_go_first() -> None:
    world = started(never, engines=1, max_num_seqs=2)
    for name in ("t0", "t1", "t2"):
        world.pool.submit(prompt(name), group_size=2)
    wait_for(lambda: "t0" in world.lives[0].asked)
    world.pool.submit(prompt("e"), group_size=2, purpose="eval")
    world.lives[0].finish("t0")
    wait_for(lambda: "e" in world.lives[0].asked)
    assert "t1" not in world.lives[0].asked and world.lives[0].records == [True, False]


def test_closing_cancels_unfinished_groups() -> None:
    world = started(lambda engine, name: name == "p0" or engine.finish(name), engines=1)
    groups = generate(world.pool, [prompt(f"p{i}") for i in range(2)], group_size=2)
    assert next(groups).prompt.prompt_id == "p1"
    groups.close()
    wait_for(lambda: world.lives[0].asked["p0"].cancelled())


def test_groups_of_a_dead_engine_are_requeued() -> None:
    def answer(engine: FakeEngine, name: str) -> None:
        if engine.name != "0.0":
            engine.finish(name)
        elif len(engine.asked) == 2:
            engine.die()

    world, lines = World(answer), list[str]()
    world.pool.say = lines.append
    assert world.run(6) == [f"p{i}" for i in range(6)]
    assert world.pool.restarts == 1 and len(lines) == 1 and "killed by signal 9" in lines[0]
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

    world, start, update = started(answer), Future[EngineStarted](), Future[int]()
    group = world.pool.submit(prompt("p"), group_size=2)
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
    start.set_result(EngineStarted(1))
    wait_for(lambda: world.lives[2].naps)
    assert world.run(4) == [f"p{i}" for i in range(4)]


def test_death_during_an_update_replaces_once() -> None:
    world = started(lambda engine, name: engine.name != "0.0" and engine.finish(name), engines=1)
    broken = Future[int]()
    world.update = lambda engine, *args: (
        broken if engine.name == "0.0" else World.load(engine, *args)
    )
    groups = [world.pool.submit(prompt(f"p{i}"), group_size=2) for i in range(2)]
    wait_for(lambda: len(world.lives[0].asked) == 2)
    updated = world.send(6)
    broken.set_exception(EngineError("killed by signal 9"))
    world.lives[0].die()
    for future in (*groups, updated):
        future.result(timeout=PATIENCE_S)
    assert world.names() == ["0.0", "0.1"] and world.lives[1].version == 6


def test_too_many_restarts_end_the_run() -> None:
    world = World(lambda engine, name: engine.die(), engines=1)
    with pytest.raises(EngineError, match="killed by signal 9"):
        world.run(1)
    assert len(world.lives) == MAX_RESTARTS + 1


def test_restarts_far_apart_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(engine: FakeEngine, name: str) -> None:
        life = int(engine.name.partition(".")[2])
        engine.die() if life <= 2 * MAX_RESTARTS else engine.finish(name)

    monkeypatch.setattr(engine_supervisor, "restart_window_s", lambda *_: 0.0)
    world = World(answer, engines=1)
    assert world.run(1) == ["p0"]
    assert world.pool.restarts == 2 * MAX_RESTARTS + 1


def test_prompt_and_weight_errors_are_final() -> None:
    error = ValueError("too long")
    world = World(lambda engine, name: engine.asked[name].set_exception(error), engines=1)
    with pytest.raises(ValueError, match="too long"):
        world.run(1)
    for update, kind in ((failed(error), ValueError), (done(4), RuntimeError)):
        world = started(engines=1)
        world.update = lambda *_, update=update: update
        with pytest.raises(kind):
            world.update_all(5)
        assert len(world.lives) == 1


def test_an_unsendable_group_fails_with_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object, **__: object) -> Any:
        raise TypeError("cannot be pickled")

    monkeypatch.setattr(FakeEngine, "generate", raises)
    with pytest.raises(TypeError, match="cannot be pickled"):
        started(engines=1).pool.submit(prompt("p"), group_size=2).result(timeout=PATIENCE_S)


def test_a_late_or_failed_start_names_the_engine() -> None:
    world = World(engines=1)
    world.start = lambda _: Future()
    world.pool = RolloutPool(world.config, world.build, startup_timeout_s=0.02)
    with pytest.raises(TimeoutError, match="engine 0"):
        world.pool.start()
    world = World()
    world.start = lambda _: failed(EngineError("no such model"))
    with pytest.raises(EngineError, match=r"engine 0.*no such model"):
        world.pool.start()


def test_a_start_disturbed_by_freed_memory_is_retried() -> None:
    world = World()
    world.start = lambda engine: (
        failed(EngineError(MEMORY_RACE))
        if engine.name in ("1.0", "1.1")
        else done(EngineStarted(1))
    )
    (warning,) = world.pool.start()
    assert "engine 1" in warning and world.names() == ["0.0", "1.0", "1.1", "1.2"]
    assert [engine.killed for engine in world.lives] == [False, True, True, False]
    world = World(engines=1)
    world.start = lambda _: failed(EngineError(MEMORY_RACE))
    with pytest.raises(EngineError, match="memory profiling"):
        world.pool.start()
    assert len(world.lives) == 3


@pytest.mark.parametrize(
    ("reasons", "recovers"),
    [
        (["pid 12: no such file", "pid 13: no such file"], False),
        (["the port is taken", "no memory"], True),
        ([MEMORY_RACE, MEMORY_RACE], True),
    ],
)
def test_restarts_that_fail_alike_end_the_run(reasons: list[str], recovers: bool) -> None:
    world, remaining = World(dies_once, engines=1), list(reasons)
    world.start = lambda engine: (
        failed(EngineError(remaining.pop(0)))
        if engine.name != "0.0" and remaining
        else done(EngineStarted(1))
    )
    if recovers:
        assert world.run(2) == ["p0", "p1"] and len(world.lives) == 4
    else:
        with pytest.raises(EngineError, match="pid 13"):
            world.run(1)
        assert len(world.lives) == 3 and all(engine.killed for engine in world.lives)


def test_warnings_are_returned_once() -> None:
    world = World(engines=3)
    world.start = lambda engine: done(EngineStarted(1, ("no fast path", engine.name)))
    assert world.pool.start() == ("no fast path", "0.0", "1.0", "2.0")


def test_an_engine_late_with_weights_is_replaced() -> None:
    world = started(update_timeout_s=0.05)
    stuck: Future[int] = Future()
    world.update = lambda engine, *args: (
        stuck if engine.name == "1.0" else World.load(engine, *args)
    )
    world.update_all(3)
    assert world.names() == ["0.0", "1.0", "1.1"] and world.lives[1].killed
    wait_for(lambda: [engine.version for engine in world.lives if not engine.killed] == [3, 3])


def test_weights_arrive_while_groups_are_sampled() -> None:
    world = started(never, engines=1)
    groups = [world.pool.submit(prompt(f"p{i}"), group_size=2) for i in range(3)]
    wait_for(lambda: len(world.lives[0].asked) == 2)
    world.update_all(4)
    assert world.lives[0].version == 4 and not any(group.done() for group in groups)
    world.lives[0].finish("p0")
    groups[0].result(timeout=PATIENCE_S)
    wait_for(lambda: "p2" in world.lives[0].asked)


def test_nothing_is_sent_to_a_loading_engine() -> None:
    world, update = started(engines=1), Future[int]()
    world.update = lambda *_: update
    updated = world.send(1)
    group = world.pool.submit(prompt("p"), group_size=2)
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
        list(generate(world.pool, [prompt("p"), prompt("q"), prompt("p")], group_size=2))
        world.update_all(version)
    assert world.lives[0].draws == [("p", 0), ("q", 0), ("p", 1)] * 2


def test_queued_prompts_keep_their_draw() -> None:
    world = started(never, engines=1, max_num_seqs=2)
    engine = world.lives[0]
    world.pool.submit(prompt("q"), group_size=2)
    first = world.pool.submit(prompt("p"), group_size=2)  # waits: the engine is full
    wait_for(lambda: "q" in engine.asked)
    world.update_all(1)
    engine.finish("q")
    wait_for(lambda: "p" in engine.asked)
    engine.finish("p")
    first.result(timeout=PATIENCE_S)
    world.pool.submit(prompt("p"), group_size=2)
    wait_for(lambda: len(engine.draws) == 3)
    assert engine.draws == [("q", 0), ("p", 0), ("p", 1)]  # both of p from weights 1
    assert [request.prompt_id for request in world.pool._open.values()] == ["p"]


def test_shutdown_kills_engines_and_fails_requests() -> None:
    world = started(never, engines=1)
    group = world.pool.submit(prompt("p"), group_size=2)
    world.pool.shutdown()
    assert world.lives[0].killed
    for late in (group, world.pool.submit(prompt("q"), group_size=2), world.send(1)):
        with pytest.raises(EngineError):
            late.result(timeout=PATIENCE_S)


@pytest.mark.parametrize("when", ["while one is built", "while they are waited for"])
def test_shutdown_cancels_a_start(when: str) -> None:
    world, reached = World(), threading.Event()
    world.start = lambda _: Future()
    build = world.build

    def built(index: int) -> FakeEngine:
        engine = build(index)
        if when == "while one is built":
            world.pool.shutdown()  # does not know this engine yet
        elif index == world.config.engines - 1:
            reached.set()
        return engine

    world.pool = RolloutPool(world.config, built, startup_timeout_s=1000 * PATIENCE_S)
    errors: list[Exception] = []

    def start() -> None:
        try:
            world.pool.start()
        except StartCancelled as error:
            errors.append(error)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    if when != "while one is built":
        assert reached.wait(PATIENCE_S)
        world.pool.shutdown()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and errors
    assert world.lives and all(engine.killed for engine in world.lives)


# Silent engines.


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A fake clock, with which engines count as unresponsive after 10 s."""
    clock = Clock()
    monkeypatch.setattr(RolloutConfig, "silent_s", 10.0)
    for module in (pool_module, engine_supervisor, dispatcher):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_silent_engine_is_replaced_without_losing_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(engine: FakeEngine, name: str) -> None:
        if engine.name != "0.0" or name == "p2":
            engine.finish(name)

    monkeypatch.setattr(RolloutConfig, "silent_s", property(lambda self: self.timeout_s + 0.1))
    world, lines = World(answer, timeout_s=0.05), list[str]()
    world.pool.say = lines.append
    assert world.run(5) == [f"p{i}" for i in range(5)]
    assert world.names() == ["0.0", "1.0", "0.1"] and world.lives[0].killed
    assert len(lines) == 1 and "prompt p0" in lines[0] and "rollout.timeout_s" in lines[0]


def test_loading_weights_is_not_silence(clock: Clock) -> None:
    world, update = started(never, engines=1), Future[int]()
    world.update = lambda *_: update
    world.pool.submit(prompt("p"), group_size=2)
    wait_for(lambda: "p" in world.lives[0].asked)
    clock.now += 9
    updated = world.send(1)
    wait_for(lambda: world.lives[0].naps)
    clock.now += 100
    update.set_result(1)
    updated.result(timeout=PATIENCE_S)
    clock.now += 9
    world.pool.submit(prompt("q"), group_size=2)
    wait_for(lambda: "q" in world.lives[0].asked)
    assert world.names() == ["0.0"]
    clock.now += 2
    world.pool.submit(prompt("r"), group_size=2)
    wait_for(lambda: world.names() == ["0.0", "0.1"])


def test_queued_groups_have_no_deadline(clock: Clock) -> None:
    world = started(never, engines=1, max_num_seqs=2)
    groups = [world.pool.submit(prompt(f"p{i}"), group_size=2) for i in range(6)]
    for index, group in enumerate(groups):
        wait_for(lambda name=f"p{index}": name in world.lives[0].asked)
        clock.now += 9
        world.lives[0].finish(f"p{index}")
        assert not group.result(timeout=PATIENCE_S).dropped
    assert world.names() == ["0.0"]


def test_restart_window_exceeds_several_silences() -> None:
    for timeout_s in (600.0, 3600.0, 36_000.0):
        config = RolloutConfig(timeout_s=timeout_s)
        assert restart_window_s(config, 600.0) > MAX_RESTARTS * (config.silent_s + 600.0)
        # Cut one step late and ended with the next: two steps of up to a minute.
        assert config.silent_s >= timeout_s + 2 * 60.0
        assert config.silent_s >= timeout_s + config.update_timeout_s


def test_only_training_is_recorded() -> None:
    world = World(engines=1)
    world.run(1)
    world.run(1, purpose="eval", sampling=SamplingConfig(temperature=0.6))
    assert world.lives[0].records == [True, False]
