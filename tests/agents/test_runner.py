"""Groups of episodes: concurrency, seeds, cancellation, failures, memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from keel.agents.runner import EpisodeKind, EpisodeRunner
from keel.agents.types import Unscored
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import Purpose
from tests.agents.scripted import BUDGET, CHAT, NO_CONTEXT, TASK, Policy, Sums
from tests.waiting import PATIENCE_S, wait_for


@dataclass
class Factory:
    """Makes environments and keeps them."""

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
    turns: Any, factory: Factory | None = None, *, most_open: int = 64
) -> Iterator[EpisodeRunner]:
    """turns: a policy, or a `TurnSampler`."""
    with EpisodeRunner(
        {
            "sums": EpisodeKind(
                environment=factory or Factory(), chat=CHAT, budget=BUDGET, context=NO_CONTEXT
            )
        },
        turns=turns.submit if isinstance(turns, Policy) else turns,
        seed=1,
        most_open=most_open,
    ) as runner:
        yield runner
    assert not any(t.name == "keel-agents" for t in threading.enumerate())


def test_repeated_prompt_draws_new_reproducible_seeds() -> None:
    def seeds(*, update: bool) -> list[set[int]]:
        policy, draws = Policy(["42"]), []
        with running(policy) as runner:
            for _ in range(2):
                runner.submit(TASK, group_size=2, purpose="train").result(PATIENCE_S)
                draws.append({r.seed for r in policy.requests})
                policy.requests.clear()
                if update:
                    runner.updating(3)
        return draws

    first, second = seeds(update=False)
    assert not first & second and seeds(update=False) == [first, second]
    assert not seeds(update=True)[1] & (first | second)


def test_resumed_run_sends_the_same_requests() -> None:
    prompts = [TASK, replace(TASK, prompt_id="s/2")]

    def requests_after(versions: Sequence[int]) -> list[Any]:
        policy, factory = Policy(["@add 40, 2", "42"]), Factory()
        with running(policy, factory) as runner:
            for version in versions:
                runner.updating(version)
                runner.submit(TASK, group_size=2, purpose="train").result(PATIENCE_S)
            policy.requests.clear()
            factory.made.clear()
            runner.updating(3)
            for prompt in prompts:
                runner.submit(prompt, group_size=2, purpose="train").result(PATIENCE_S)
        tasks = sorted(environment.log[0] for environment in factory.made)
        turns = sorted((r.conversation, r.seed, r.token_ids_T.tolist()) for r in policy.requests)
        return [tasks, turns]

    assert requests_after([]) == requests_after([0, 1, 2])


def test_open_episodes_are_limited() -> None:
    counts: list[int] = []
    factory = Factory()
    policy = Policy(lambda _, turn: counts.append(factory.open) or "42")
    with running(policy, factory, most_open=3) as runner:
        groups = [runner.submit(TASK, group_size=4, purpose="train") for _ in range(4)]
        assert sum(len(group.result(PATIENCE_S).trajectories) for group in groups) == 16
    assert max(counts) <= 3


def test_dropped_episode_keeps_its_siblings() -> None:
    made = iter([Sums(), Sums(fails="call"), Sums(grade=Unscored(reason="no tests")), Sums()])
    with running(Policy(["@add 40, 2", "42"]), Factory(lambda: next(made))) as runner:
        group = runner.submit(TASK, group_size=4, purpose="train").result(PATIENCE_S)
    assert [t.sibling for t in group.trajectories] == [0, 3]
    assert sorted(reason.partition(":")[0] for reason in group.dropped) == [
        "environment, at call",
        "the environment has no verdict",
    ]


def test_engine_error_fails_the_group() -> None:
    factory, policy = Factory(), Policy([])
    policy.fail = ValueError("prompt s/1: too long")
    with running(policy, factory) as runner, pytest.raises(ValueError, match="s/1"):
        runner.submit(TASK, group_size=3, purpose="train").result(PATIENCE_S)
    assert factory.open == 0


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_cancelled_group_leaves_nothing_open(how: str) -> None:
    futures: list[Future[TurnResult]] = []

    def turns(request: TurnRequest, purpose: Purpose) -> Future[TurnResult]:
        futures.append(Future())
        return futures[-1]

    factory = Factory()
    with running(turns, factory) as runner:
        group = runner.submit(TASK, group_size=3, purpose="train")
        wait_for(lambda: len(futures) == 3)
        if how == "cancel":
            assert group.cancel()
    with pytest.raises(CancelledError):
        group.result(PATIENCE_S)
    assert factory.open == 0 and len(factory.made) == 3
    assert all(future.cancelled() for future in futures)
