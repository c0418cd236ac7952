"""Many episodes open at once: their cost does not grow from wave to wave, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path

import pytest

from keel.agents.env_process.children import below
from keel.agents.env_process.client import Hosted, fork_server_for
from keel.agents.runner import EpisodeLimits, EpisodeRunner
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import Purpose
from tests.agents.episodes import TASK as HOSTED_TASK
from tests.agents.episodes import program, run, use
from tests.agents.sandboxes import attackers, wrap_of
from tests.agents.scripted import BUDGET, NO_CONTEXT, TASK, Sums, chat, says
from tests.waiting import PATIENCE_S, wait_for

MANY = 400
WAVES = 3
FLAT_MIB = 4.0
"""More that this process, or the parent, may have in a wave than in the one before. What leaks does
so in each of them; what an allocator keeps, in one."""


def resident_mib(pid: int | str = "self") -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def least_growth(taken: list[float]) -> float:
    return min(now - before for before, now in pairwise(taken))


def test_in_this_process() -> None:
    policy = says("42")
    waiting: list[tuple[TurnRequest, Future[TurnResult]]] = []

    def turns(request: TurnRequest, purpose: Purpose) -> Future[TurnResult]:
        waiting.append((request, Future()))
        return waiting[-1][1]

    taken: list[float] = []
    with EpisodeRunner(
        {"sums": Sums},
        chat=chat(),
        turns=turns,
        limits={"sums": EpisodeLimits(BUDGET, NO_CONTEXT)},
        seed=1,
        most_open=MANY,
    ) as runner:
        for _ in range(WAVES):
            groups = [runner.submit(TASK, group_size=8, purpose="train") for _ in range(MANY // 8)]
            wait_for(lambda: len(waiting) >= MANY)  # none ends before all are open
            for request, future in waiting:
                future.set_result(policy.say(request))
            assert all(len(group.result(PATIENCE_S).trajectories) == 8 for group in groups)
            waiting.clear()
            policy.requests.clear()
            del groups
            gc.collect()
            taken.append(resident_mib())
    assert least_growth(taken) < FLAT_MIB


@pytest.mark.e2e
@pytest.mark.parametrize(
    "sandboxed", [False, pytest.param(True, marks=pytest.mark.e2e)], ids=["alone", "sandbox"]
)
def test_in_processes_that_are_forked(sandboxed: bool) -> None:
    many = 60 if sandboxed else 24

    others = set(below(os.getpid()))  # of other tests

    def made() -> set[int]:
        return set(below(os.getpid())) - others

    async def play() -> None:
        given = program()
        if sandboxed:
            given = attackers(wrap_of())
        parent = fork_server_for(given)
        assert parent is not None
        starting = asyncio.Semaphore(4)
        ours, theirs, files = [], [], set[int]()
        for _ in range(WAVES):
            open_now = [Hosted(given, starting=starting, parent=parent) for _ in range(many)]
            await asyncio.gather(*(one.open(HOSTED_TASK, seed=3) for one in open_now))
            assert not parent.why_not
            tool, given_to_it = ("fill", {"folder": "/nowhere"}) if sandboxed else ("call", {})
            said = await asyncio.gather(*(use(one, tool, **given_to_it) for one in open_now))
            assert len(said) == many
            assert len(made()) >= many * (1 + sandboxed)
            await asyncio.gather(*(one.close() for one in open_now))
            assert parent._running is not None
            left = made()
            assert len(left) <= 3  # the parent, in a sandbox with two around it
            ours.append(resident_mib())
            theirs.append(sum(map(resident_mib, left)))
            files.add(len(os.listdir("/proc/self/fd")))
        await parent.close()
        assert not made() and len(files) == 1
        assert least_growth(ours) < FLAT_MIB and least_growth(theirs) < FLAT_MIB

    run(play())
