"""The pool against fake engines: balance, deadlines, deaths, weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from keel.configs.schema import SamplingConfig
from keel.rl.types import Group
from keel.rollout.pool.engine_supervisor import MAX_RESTARTS
from keel.rollout.pool.pool import RolloutPool
from keel.rollout.spec import EngineError, Started
from keel.weights.sync import StoreTransfer
from tests.rl.rollouts import prompt
from tests.rollout.pool.fake_engines import FakeEngine, World, done, failed, generate
from tests.waiting import PATIENCE_S, wait_for


def ids(groups: Sequence[Group]) -> list[str]:
    return sorted(group.prompt.prompt_id for group in groups)


def test_every_prompt_is_answered_once() -> None:
    assert ids(World().run(7)) == [f"p{i}" for i in range(7)]


def test_work_is_shared_out_evenly_and_bounded() -> None:
    world = World(answer=lambda engine, name: None)
    world.pool.start()
    for index in range(12):
        world.pool.submit(prompt(f"p{index}"), group_size=2)
    wait_for(lambda: sum(len(engine.asked) for engine in world.lives) == 4)
    time.sleep(0.02)
    # Two answers to a prompt, four sequences an engine: two groups each, the rest waits.
    assert [sorted(engine.asked) for engine in world.lives] == [["p0", "p2"], ["p1", "p3"]]


def test_the_engine_with_less_to_do_gets_the_next_group() -> None:
    def answer(engine: FakeEngine, name: str) -> None:
        if engine.name == "1.0":
            engine.finish(name)

    world = World(answer=answer)
    world.pool.start()
    groups = [world.pool.submit(prompt(f"p{i}"), group_size=2) for i in range(8)]
    wait_for(lambda: sum(group.done() for group in groups) == 6)
    slow, quick = world.lives
    assert len(slow.asked) == 2 and len(quick.asked) == 6


def test_groups_of_a_dead_engine_go_to_the_others() -> None:
    def answer(engine: FakeEngine, name: str) -> None:
        if engine.name == "0.0":
            if len(engine.asked) == 2:
                engine.die()
        else:
            engine.finish(name)

    world, said = World(answer=answer), list[str]()
    world.pool.say = said.append
    assert ids(world.run(6)) == [f"p{i}" for i in range(6)]
    assert world.pool.restarts == 1
    assert said == ["rollout engine 0 is started again: killed by signal 9"]
    assert world.lives[0].killed and not world.lives[1].killed


def test_a_restarted_engine_gets_the_latest_weights_before_it_samples() -> None:
    def answer(engine: FakeEngine, name: str) -> None:
        assert engine.version == 7, "sampled from old weights"
        if engine.name == "0.0":
            engine.die()
        else:
            engine.finish(name)

    world = World(answer=answer, engines=1)
    world.pool.start()
    world.update_all(7, ["bucket"])
    assert ids(world.run(3)) == ["p0", "p1", "p2"]
    assert world.names() == ["0.0", "0.1"]
    assert world.lives[1].version == 7


@pytest.mark.parametrize("when", ["before the update", "in the middle of it"])
def test_the_others_go_on_while_an_engine_starts_again(when: str) -> None:
    """And with new weights, which it takes before it samples."""

    def answer(engine: FakeEngine, name: str) -> None:
        assert engine.name != "0.1" or engine.version == 8, "sampled from old weights"
        if engine.name != "0.0":
            engine.finish(name)

    world, coming, taken = World(answer=answer), Future[Started](), Future[int]()
    world.pool.start()
    asked = world.pool.submit(prompt("p"), group_size=2)
    wait_for(lambda: world.lives[0].asked)
    world.start = lambda engine: coming
    take = world.update
    world.update = lambda engine, version, buckets: (  # type: ignore[method-assign]
        taken if engine.name == "0.0" else take(engine, version, buckets)
    )
    if when == "before the update":
        world.lives[0].die()
        wait_for(lambda: len(world.lives) == 3)
    updated = world.pool.update(7, StoreTransfer(7, []))
    wait_for(lambda: world.lives[1].naps)
    if when != "before the update":
        assert not updated.done()
        taken.set_exception(EngineError("killed by signal 9"))
    updated.result(timeout=PATIENCE_S)
    assert asked.result(timeout=PATIENCE_S).prompt.prompt_id == "p"
    world.update_all(8)
    assert not coming.done() and world.lives[1].version == 8 and not world.lives[2].naps
    coming.set_result(Started(1))
    wait_for(lambda: world.lives[2].naps)
    assert ids(list(generate(world.pool, [prompt(f"q{i}") for i in range(4)], group_size=2))) == [
        f"q{i}" for i in range(4)
    ]
    world.pool.shutdown()


def test_an_engine_that_keeps_dying_ends_the_run_with_its_reason() -> None:
    world = World(answer=lambda engine, name: engine.die(), engines=1)
    with pytest.raises(EngineError, match=r"engine 0 failed 4 times.*killed by signal 9"):
        world.run(1)
    assert len(world.lives) == MAX_RESTARTS + 1


def test_failures_that_lie_far_apart_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(engine: FakeEngine, name: str) -> None:
        if int(engine.name.partition(".")[2]) <= 2 * MAX_RESTARTS:
            engine.die()
        else:
            engine.finish(name)

    monkeypatch.setattr("keel.rollout.pool.engine_supervisor.window_s", lambda *_: 0.0)
    world = World(answer=answer, engines=1)
    assert ids(world.run(1)) == ["p0"]
    assert world.pool.restarts == 2 * MAX_RESTARTS + 1


def test_what_an_engine_says_about_a_prompt_is_raised() -> None:
    def answer(engine: FakeEngine, name: str) -> None:
        engine.asked[name].set_exception(ValueError(f"prompt {name}: too long"))

    with pytest.raises(ValueError, match="prompt p0: too long"):
        World(answer=answer).run(1)


def test_a_group_that_cannot_be_sent_fails_with_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object, **__: object) -> Future[Group]:
        raise TypeError("cannot be pickled")

    monkeypatch.setattr(FakeEngine, "generate", raises)
    world = World(engines=1)
    world.pool.start()
    with pytest.raises(TypeError, match="cannot be pickled"):
        world.pool.submit(prompt("p"), group_size=2).result(timeout=PATIENCE_S)


def test_an_engine_that_does_not_start_is_named() -> None:
    world = World(engines=1)
    world.start = lambda engine: Future()
    world.pool = RolloutPool(world.config, world.build, startup_timeout_s=0.02)
    with pytest.raises(TimeoutError, match=r"engine 0 was not ready within 0.02 s"):
        world.pool.start()


def test_an_engine_that_cannot_start_says_why() -> None:
    world = World(engines=2)
    world.start = lambda engine: failed(EngineError("ValueError: no such model"))
    with pytest.raises(EngineError, match=r"engine 0 did not start: ValueError: no such model"):
        world.pool.start()


FREED = "AssertionError: Error in memory profiling. Initial free memory 109.58 GiB, current 137.77"


def test_a_start_that_others_memory_disturbs_is_tried_again() -> None:
    """As where what was ended a moment ago still gives its memory back."""
    world = World(engines=2)
    world.start = lambda engine: (
        failed(EngineError(FREED)) if engine.name in ("1.0", "1.1") else done(Started(1))
    )
    said = "rollout engine 1 was started again: another process gave GPU memory back"
    assert world.pool.start() == (said,)
    assert world.names() == ["0.0", "1.0", "1.1", "1.2"]
    assert [engine.killed for engine in world.lives] == [False, True, True, False]
    world.pool.shutdown()
    world = World(engines=1)
    world.start = lambda engine: failed(EngineError(FREED))
    with pytest.raises(EngineError, match=r"engine 0 did not start: .*memory profiling"):
        world.pool.start()
    assert len(world.lives) == 3


def test_a_restart_that_others_memory_disturbs_is_tried_again() -> None:
    def answer(engine: FakeEngine, name: str) -> None:
        engine.die() if engine.name == "0.0" else engine.finish(name)

    world = World(answer=answer, engines=1)
    world.start = lambda engine: (
        failed(EngineError(FREED)) if engine.name in ("0.1", "0.2") else done(Started(1))
    )
    assert ids(world.run(2)) == ["p0", "p1"]
    assert world.names() == ["0.0", "0.1", "0.2", "0.3"]


def test_what_engines_warn_of_is_handed_on_once() -> None:
    world = World(engines=3)
    world.start = lambda engine: done(Started(1, ("no fast path", f"{engine.name[0] == '2'}")))
    assert world.pool.start() == ("no fast path", "False", "True")
    world.pool.shutdown()


def test_a_start_that_fails_twice_in_the_same_way_ends_the_run() -> None:
    world = World(answer=lambda engine, name: engine.die(), engines=1)
    reasons = iter(["pid 12: no such file", "pid 13: no such file"])
    world.start = lambda engine: (
        done(Started(1)) if engine.name == "0.0" else failed(EngineError(next(reasons)))
    )
    with pytest.raises(EngineError, match=r"engine 0 failed to start twice.*: pid 13: no such"):
        world.run(1)
    assert len(world.lives) == 3 and all(engine.killed for engine in world.lives)


def test_starts_that_fail_in_different_ways_are_tried_again() -> None:
    def answer(engine: FakeEngine, name: str) -> None:
        engine.die() if engine.name == "0.0" else engine.finish(name)

    world = World(answer=answer, engines=1)
    reasons = iter(["the port is taken", "no memory"])
    world.start = lambda engine: (
        done(Started(1)) if engine.name in ("0.0", "0.3") else failed(EngineError(next(reasons)))
    )
    assert ids(world.run(2)) == ["p0", "p1"]
    assert world.names() == ["0.0", "0.1", "0.2", "0.3"]


def test_an_engine_that_is_late_with_new_weights_is_replaced() -> None:
    world = World(update_timeout_s=0.05)
    world.pool.start()
    load = world.update
    stuck: Future[int] = Future()
    world.update = lambda engine, version, buckets: (  # type: ignore[method-assign]
        stuck if engine.name == "1.0" else load(engine, version, buckets)
    )
    world.update_all(3, [])
    assert world.names() == ["0.0", "1.0", "1.1"]
    assert world.lives[1].killed
    wait_for(lambda: [engine.version for engine in world.lives if not engine.killed] == [3, 3])


def test_a_wrong_version_after_an_update_is_an_error() -> None:
    world = World(engines=1)
    world.update = lambda engine, version, buckets: done(version - 1)  # type: ignore[method-assign]
    world.pool.start()
    with pytest.raises(RuntimeError, match=r"engine 0: reports weights 4 after an update to 5"):
        world.update_all(5, [])


def test_bad_weights_are_raised_not_retried() -> None:
    world = World(engines=1)
    world.update = lambda engine, version, buckets: failed(ValueError("no tensor 'x'"))  # type: ignore[method-assign]
    world.pool.start()
    with pytest.raises(ValueError, match="no tensor 'x'"):
        world.update_all(1)
    assert len(world.lives) == 1


def test_groups_come_as_they_finish_and_abandoned_ones_are_cancelled() -> None:
    world = World(answer=lambda engine, name: name == "p0" or engine.finish(name), engines=1)
    world.pool.start()
    prompts = [prompt(f"p{i}") for i in range(2)]
    groups = generate(world.pool, prompts, group_size=2)
    assert next(groups).prompt.prompt_id == "p1"
    groups.close()
    wait_for(lambda: world.lives[0].asked["p0"].cancelled())


def test_weights_come_while_groups_are_being_sampled() -> None:
    world = World(answer=lambda engine, name: None, engines=1)
    world.pool.start()
    groups = [world.pool.submit(prompt(f"p{i}"), group_size=2) for i in range(3)]
    wait_for(lambda: len(world.lives[0].asked) == 2)
    world.update_all(4)
    assert world.lives[0].version == 4 and not any(group.done() for group in groups)
    world.lives[0].finish("p0")
    assert groups[0].result(timeout=PATIENCE_S).prompt.prompt_id == "p0"
    wait_for(lambda: "p2" in world.lives[0].asked)


def test_nothing_is_sent_to_an_engine_that_takes_weights() -> None:
    world = World(engines=1)
    taken: Future[int] = Future()
    world.update = lambda engine, version, buckets: taken  # type: ignore[method-assign]
    world.pool.start()
    updated = world.pool.update(1, StoreTransfer(1, []))
    group = world.pool.submit(prompt("p"), group_size=2)
    with pytest.raises(RuntimeError, match="version 1 is still on its way"):
        world.pool.update(2, StoreTransfer(2, []))
    time.sleep(0.05)
    assert not group.done() and not world.lives[0].asked
    taken.set_result(1)
    updated.result(timeout=PATIENCE_S)
    assert group.result(timeout=PATIENCE_S).prompt.prompt_id == "p"


def test_an_engine_that_dies_with_weights_and_groups_on_it_is_replaced_once() -> None:
    def answer(engine: FakeEngine, name: str) -> None:
        if engine.name != "0.0":
            engine.finish(name)

    world = World(answer=answer, engines=1)
    load, broken = world.update, Future[int]()
    world.update = lambda engine, version, buckets: (  # type: ignore[method-assign]
        broken if engine.name == "0.0" else load(engine, version, buckets)
    )
    world.pool.start()
    groups = [world.pool.submit(prompt(f"p{i}"), group_size=2) for i in range(2)]
    wait_for(lambda: len(world.lives[0].asked) == 2)
    updated = world.pool.update(6, StoreTransfer(6, []))
    broken.set_exception(EngineError("killed by signal 9"))
    world.lives[0].die()
    assert ids([group.result(timeout=PATIENCE_S) for group in groups]) == ["p0", "p1"]
    updated.result(timeout=PATIENCE_S)
    assert world.names() == ["0.0", "0.1"] and world.lives[1].version == 6


def test_evaluations_go_first() -> None:
    world = World(answer=lambda engine, name: None, engines=1, max_num_seqs=2)
    world.pool.start()
    for name in ("t0", "t1", "t2"):
        world.pool.submit(prompt(name), group_size=2)
    wait_for(lambda: "t0" in world.lives[0].asked)
    world.pool.submit(prompt("e"), group_size=2, purpose="eval")
    world.lives[0].finish("t0")
    wait_for(lambda: "e" in world.lives[0].asked)
    assert "t1" not in world.lives[0].asked


def test_what_is_under_way_fails_at_the_end() -> None:
    world = World(answer=lambda engine, name: None, engines=1)
    world.pool.start()
    group = world.pool.submit(prompt("p"), group_size=2)
    world.pool.shutdown()
    for late in (
        group,
        world.pool.submit(prompt("q"), group_size=2),
        world.pool.update(1, StoreTransfer(1, [])),
    ):
        with pytest.raises(EngineError, match="has been shut down"):
            late.result(timeout=PATIENCE_S)


def test_a_prompt_that_comes_twice_is_not_answered_in_the_same_words() -> None:
    world = World(engines=1)
    world.pool.start()
    for version in (1, 2):
        list(generate(world.pool, [prompt("p"), prompt("q"), prompt("p")], group_size=2))
        world.update_all(version)
    assert world.lives[0].draws == [("p", 0), ("q", 0), ("p", 1)] * 2


def test_a_prompt_that_waits_for_new_weights_keeps_its_draw() -> None:
    world = World(engines=1, max_num_seqs=2, answer=lambda engine, name: None)
    world.pool.start()
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
    assert engine.draws == [("q", 0), ("p", 0), ("p", 1)]  # both of p by weights 1
    assert [order.prompt_id for order in world.pool._open.values()] == ["p"]


def test_only_training_is_recorded() -> None:
    world = World(engines=1)
    world.run(1)
    world.run(1, purpose="eval", sampling=SamplingConfig(temperature=0.6))
    assert world.lives[0].records == [True, False]
