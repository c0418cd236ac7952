"""Groups of episodes: many at once, given up, failed and closed, and their seeds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from keel.agents.runner import EpisodeLimits, EpisodeRunner
from keel.agents.types import Unscored
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import Purpose
from tests.agents.scripted import BUDGET, END, NO_CONTEXT, TASK, Policy, Sums, chat, says
from tests.waiting import PATIENCE_S


@dataclass
class World:
    """All environments that were made, and how."""

    make: Callable[[], Sums] = Sums
    made: list[Sums] = field(default_factory=list[Sums])

    def __call__(self) -> Sums:
        self.made.append(self.make())
        return self.made[-1]

    @property
    def open(self) -> int:
        return sum(environment.log[-1] != "close" for environment in self.made)


@contextmanager
def running(
    policy: Policy,
    world: World | None = None,
    *,
    most_open: int = 64,
    crash_is_failure: Mapping[str, Collection[str]] | None = None,
) -> Iterator[EpisodeRunner]:
    with EpisodeRunner(
        {"sums": world or World()},
        chat=chat(),
        turns=policy.turns(),
        limits={"sums": EpisodeLimits(BUDGET, NO_CONTEXT)},
        seed=1,
        most_open=most_open,
        crash_is_failure=crash_is_failure,
    ) as runner:
        yield runner
    assert not any(t.name == "keel-agents" for t in threading.enumerate())


def test_a_group_has_its_siblings_in_order_and_its_seeds() -> None:
    policy, world = says("@add 40, 2", "42"), World()
    with running(policy, world) as runner:
        group = runner.submit(TASK, group_size=5, purpose="train").result(PATIENCE_S)
    assert [t.sibling for t in group.trajectories] == [0, 1, 2, 3, 4] and not group.dropped
    assert len({request.seed for request in policy.requests}) == 10
    assert len({request.conversation for request in policy.requests}) == 5
    assert len({environment.log[0] for environment in world.made}) == 1, "siblings differ in task"
    assert world.open == 0


def test_the_same_prompt_draws_anew_and_the_same_run_draws_the_same() -> None:
    def seeds(*, update: bool) -> list[set[int]]:
        policy, found = says("42"), []
        with running(policy) as runner:
            for _ in range(2):
                runner.submit(TASK, group_size=2, purpose="train").result(PATIENCE_S)
                found.append({r.seed for r in policy.requests})
                policy.requests.clear()
                if update:
                    runner.updating(3)
        return found

    first, second = seeds(update=False)
    assert not first & second and seeds(update=False) == [first, second]
    assert not seeds(update=True)[1] & (first | second)


def test_a_run_that_goes_on_from_a_checkpoint_asks_what_it_would_have_asked() -> None:
    """The same tasks, contexts and draws, though the prompts have been asked before."""
    prompts = [TASK, replace(TASK, prompt_id="s/2")]

    def asked(before: Sequence[int]) -> list[Any]:
        policy, world = says("@add 40, 2", "42"), World()
        with running(policy, world) as runner:
            for version in before:
                runner.updating(version)
                runner.submit(TASK, group_size=2, purpose="train").result(PATIENCE_S)
            policy.requests.clear()
            world.made.clear()
            runner.updating(3)
            for prompt in prompts:
                runner.submit(prompt, group_size=2, purpose="train").result(PATIENCE_S)
        tasks = sorted(environment.log[0] for environment in world.made)
        turns = sorted((r.conversation, r.seed, r.token_ids_T.tolist()) for r in policy.requests)
        return [tasks, turns]

    assert asked(before=[]) == asked(before=[0, 1, 2])


def test_no_more_are_open_than_allowed() -> None:
    seen: list[int] = []
    world = World()
    policy = Policy(lambda turn, _: seen.append(world.open) or "42" + END)
    with running(policy, world, most_open=3) as runner:
        groups = [runner.submit(TASK, group_size=4, purpose="train") for _ in range(4)]
        assert sum(len(group.result(PATIENCE_S).trajectories) for group in groups) == 16
    assert max(seen) <= 3


def test_what_has_no_trajectory_is_dropped_with_its_reason_and_its_siblings_stay() -> None:
    made = iter([Sums(), Sums(fails="call"), Sums(grade=Unscored(reason="no tests")), Sums()])
    with running(says("@add 40, 2", "42"), World(lambda: next(made))) as runner:
        group = runner.submit(TASK, group_size=4, purpose="train").result(PATIENCE_S)
    assert [t.sibling for t in group.trajectories] == [0, 3]
    assert sorted(reason.partition(":")[0] for reason in group.dropped) == [
        "environment, at call",
        "the environment has no verdict",
    ]


@pytest.mark.parametrize("failure", [False, True])
def test_an_environment_that_goes_down_with_many_is_said_once(failure: bool) -> None:
    fails = iter(["call", "", "open", "", *["call"] * 8])
    said: list[str] = []
    zero = {"sums": ("call", "reply") if failure else ()}  # as a recipe's `on_crash` becomes
    world = World(lambda: Sums(fails=next(fails)))
    with running(says("@add 40, 2", "42"), world, crash_is_failure=zero) as runner:
        runner.say = said.append
        for crashes in (1, 4, 4):
            group = runner.submit(TASK, group_size=4, purpose="train").result(PATIENCE_S)
            reasons = [t.finish_reason for t in group.trajectories]
            assert reasons.count("crash") == (crashes if failure else 0)
            assert len(said) == (crashes == 4), "one of four is not many"
    assert "4 of 4 episodes of prompt s/1" in said[0] and "ended with SIGSEGV" in said[0]
    knob = "data.sources[sums].environment.on_crash: zero"
    assert ("count as failures" in said[0], knob in said[0]) == (failure, not failure)


def test_what_an_engine_says_is_what_the_group_fails_with() -> None:
    def script(turn: int, _: str) -> str:
        raise ValueError("prompt s/1: too long")

    world = World()
    with running(Policy(script), world) as runner, pytest.raises(ValueError, match="too long"):
        runner.submit(TASK, group_size=3, purpose="train").result(PATIENCE_S)
    assert world.open == 0


def waiting(asked: list[Future[TurnResult]]) -> Callable[..., Future[TurnResult]]:
    def turns(request: TurnRequest, purpose: Purpose) -> Future[TurnResult]:
        asked.append(Future())
        return asked[-1]

    return turns


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_group_that_is_given_up_leaves_nothing_open(how: str) -> None:
    asked: list[Future[TurnResult]] = []
    policy, world = says("42"), World()
    policy.turns = lambda: waiting(asked)  # type: ignore[method-assign]
    begun = threading.Event()
    world.make = lambda: begun.set() or Sums()  # type: ignore[func-returns-value]
    with running(policy, world) as runner:
        group = runner.submit(TASK, group_size=3, purpose="train")
        assert begun.wait(PATIENCE_S)
        while len(asked) < 3:
            assert not group.done()
        if how == "cancel":
            assert group.cancel()
    with pytest.raises(CancelledError):
        group.result(PATIENCE_S)
    assert world.open == 0 and len(world.made) == 3
    assert all(future.cancelled() for future in asked)


def test_an_environment_that_is_not_there_is_named() -> None:
    with running(says("42")) as runner, pytest.raises(ValueError, match=r"s/1.*'shop'.*sums"):
        runner.submit(replace(TASK, environment="shop"), group_size=1, purpose="train")


def test_an_evaluation_does_not_wait_for_episodes_of_training() -> None:
    asked: list[Future[TurnResult]] = []
    policy = says("42")
    answer = policy.say

    def turns(request: TurnRequest, purpose: Purpose) -> Future[TurnResult]:
        future: Future[TurnResult] = Future()
        if purpose == "train":
            asked.append(future)
        else:
            future.set_result(answer(request))
        return future

    policy.turns = lambda: turns  # type: ignore[method-assign]
    with running(policy, most_open=1) as runner:
        held = runner.submit(TASK, group_size=3, purpose="train")
        measured = runner.submit(TASK, group_size=2, purpose="eval").result(PATIENCE_S)
        assert len(measured.trajectories) == 2 and not held.done() and len(asked) <= 1
