"""Groups of episodes: concurrency, seeds, cancellation, failures, memory."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_process.client import Hosted, fork_server_for
from keel.agents.env_process.process import descendants
from keel.agents.runner import EpisodeLimits, EpisodeRunner
from keel.agents.types import Unscored
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import Purpose
from tests.agents.episodes import TASK as HOSTED_TASK
from tests.agents.episodes import program, run, use
from tests.agents.sandboxes import attackers, wrap_of
from tests.agents.scripted import BUDGET, END, NO_CONTEXT, TASK, Policy, Sums, chat, says
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
    turns: Any,
    factory: Factory | None = None,
    *,
    most_open: int = 64,
    crash_is_failure: Mapping[str, Collection[str]] | None = None,
) -> Iterator[EpisodeRunner]:
    """turns: a policy, or a `TurnSampler`."""
    with EpisodeRunner(
        {"sums": factory or Factory()},
        chat=chat(),
        turns=turns.turns() if isinstance(turns, Policy) else turns,
        limits={"sums": EpisodeLimits(BUDGET, NO_CONTEXT)},
        seed=1,
        most_open=most_open,
        crash_is_failure=crash_is_failure,
    ) as runner:
        yield runner
    assert not any(t.name == "keel-agents" for t in threading.enumerate())


def test_siblings_share_the_task_and_differ_in_seed() -> None:
    policy, factory = says("@add 40, 2", "42"), Factory()
    with running(policy, factory) as runner:
        group = runner.submit(TASK, group_size=5, purpose="train").result(PATIENCE_S)
    assert [t.sibling for t in group.trajectories] == [0, 1, 2, 3, 4] and not group.dropped
    assert len({request.seed for request in policy.requests}) == 10
    assert len({request.conversation for request in policy.requests}) == 5
    assert len({environment.log[0] for environment in factory.made}) == 1
    assert factory.open == 0


def test_repeated_prompt_draws_new_reproducible_seeds() -> None:
    def seeds(*, update: bool) -> list[set[int]]:
        policy, draws = says("42"), []
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
        policy, factory = says("@add 40, 2", "42"), Factory()
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
    policy = Policy(lambda turn, _: counts.append(factory.open) or "42" + END)
    with running(policy, factory, most_open=3) as runner:
        groups = [runner.submit(TASK, group_size=4, purpose="train") for _ in range(4)]
        assert sum(len(group.result(PATIENCE_S).trajectories) for group in groups) == 16
    assert max(counts) <= 3


def test_dropped_episode_keeps_its_siblings() -> None:
    made = iter([Sums(), Sums(fails="call"), Sums(grade=Unscored(reason="no tests")), Sums()])
    with running(says("@add 40, 2", "42"), Factory(lambda: next(made))) as runner:
        group = runner.submit(TASK, group_size=4, purpose="train").result(PATIENCE_S)
    assert [t.sibling for t in group.trajectories] == [0, 3]
    assert sorted(reason.partition(":")[0] for reason in group.dropped) == [
        "environment, at call",
        "the environment has no verdict",
    ]


@pytest.mark.parametrize("failure", [False, True])
def test_frequent_crashes_are_reported_once(failure: bool) -> None:
    fails = iter(["call", "", "open", "", *["call"] * 8])
    lines: list[str] = []
    phases = {"sums": ("call", "reply") if failure else ()}
    factory = Factory(lambda: Sums(fails=next(fails)))
    with running(says("@add 40, 2", "42"), factory, crash_is_failure=phases) as runner:
        runner.say = lines.append
        for crashes in (1, 4, 4):
            group = runner.submit(TASK, group_size=4, purpose="train").result(PATIENCE_S)
            reasons = [t.finish_reason for t in group.trajectories]
            assert reasons.count("crash") == (crashes if failure else 0)
            assert len(lines) == (crashes == 4), "one of four is not many"
    assert "s/1" in lines[0] and "ended with SIGSEGV" in lines[0]
    assert ("data.sources[sums].environment.on_crash: zero" in lines[0]) == (not failure)


def test_engine_error_fails_the_group() -> None:
    def fails(turn: int, _: str) -> str:
        raise ValueError("prompt s/1: too long")

    factory = Factory()
    with running(Policy(fails), factory) as runner, pytest.raises(ValueError, match="s/1"):
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


def test_unknown_environment_is_named() -> None:
    with running(says("42")) as runner, pytest.raises(ValueError, match=r"s/1.*'shop'.*sums"):
        runner.submit(replace(TASK, environment="shop"), group_size=1, purpose="train")


def test_evaluation_does_not_wait_for_training() -> None:
    pending: list[Future[TurnResult]] = []
    policy = says("42")

    def turns(request: TurnRequest, purpose: Purpose) -> Future[TurnResult]:
        future: Future[TurnResult] = Future()
        if purpose == "train":
            pending.append(future)
        else:
            future.set_result(policy.say(request))
        return future

    with running(turns, most_open=1) as runner:
        held = runner.submit(TASK, group_size=3, purpose="train")
        measured = runner.submit(TASK, group_size=2, purpose="eval").result(PATIENCE_S)
        assert len(measured.trajectories) == 2 and not held.done() and len(pending) <= 1


MANY = 400
WAVES = 3
MAX_GROWTH_MIB = 4.0
"""Memory growth allowed between two waves. A leak grows in every wave, an allocator's cache in
one."""


def resident_mib(pid: int | str = "self") -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def least_growth(samples: list[float]) -> float:
    return min(now - before for before, now in pairwise(samples))


def test_many_episodes_leak_no_memory() -> None:
    policy = says("42")
    waiting: list[tuple[TurnRequest, Future[TurnResult]]] = []

    def turns(request: TurnRequest, purpose: Purpose) -> Future[TurnResult]:
        waiting.append((request, Future()))
        return waiting[-1][1]

    samples: list[float] = []
    with running(turns, most_open=MANY) as runner:
        for _ in range(WAVES):
            groups = [runner.submit(TASK, group_size=8, purpose="train") for _ in range(MANY // 8)]
            wait_for(lambda: len(waiting) >= MANY)  # all are open before one ends
            for request, future in waiting:
                future.set_result(policy.say(request))
            assert all(len(group.result(PATIENCE_S).trajectories) == 8 for group in groups)
            waiting.clear()
            policy.requests.clear()
            runner._environments["sums"].made.clear()  # type: ignore[attr-defined]
            del groups
            gc.collect()
            samples.append(resident_mib())
    assert least_growth(samples) < MAX_GROWTH_MIB


@pytest.mark.e2e
@pytest.mark.parametrize("sandboxed", [False, True])
def test_many_forked_processes_leave_nothing(sandboxed: bool) -> None:
    many = 60 if sandboxed else 24
    before = set(descendants(os.getpid()))

    def new() -> set[int]:
        return set(descendants(os.getpid())) - before

    async def play() -> None:
        spec = attackers(wrap_of()) if sandboxed else program()
        server = fork_server_for(spec)
        assert server is not None
        starting = asyncio.Semaphore(4)
        ours, theirs, files = [], [], set[int]()
        tool, arguments = ("fill", {"folder": "/nowhere"}) if sandboxed else ("call", {})
        for _ in range(WAVES):
            wave = [Hosted(spec, starting=starting, fork_server=server) for _ in range(many)]
            await asyncio.gather(*(one.open(HOSTED_TASK, seed=3) for one in wave))
            assert not server.disabled_reason
            results = await asyncio.gather(*(use(one, tool, **arguments) for one in wave))
            assert len(results) == many
            assert len(new()) >= many * (1 + sandboxed)
            await asyncio.gather(*(one.close() for one in wave))
            remaining = new()
            assert len(remaining) <= 3, "the server, with a sandbox of two processes"
            ours.append(resident_mib())
            theirs.append(sum(map(resident_mib, remaining)))
            files.add(len(os.listdir("/proc/self/fd")))
        await server.close()
        assert not new() and len(files) == 1
        assert least_growth(ours) < MAX_GROWTH_MIB and least_growth(theirs) < MAX_GROWTH_MIB

    run(play())
