"""Episodes that are forked from a process which has loaded their program."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest

from keel.agents.env_process.children import below
from keel.agents.env_process.client import Hosted, Program, fork_server_for
from keel.agents.env_process.fork_server import ForkServer
from keel.agents.types import EnvironmentLost
from tests.agents.episodes import TASK, alive, program, run, transcript, use
from tests.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.e2e


def counter(how: str = "", **settings: Any) -> Program:
    return program("preloaded:Counter", env={"AT_IMPORT": how}, **settings)


@asynccontextmanager
async def parent_for(program: Program) -> AsyncIterator[ForkServer]:
    parent = fork_server_for(program)
    assert parent is not None
    try:
        yield parent
    finally:
        await parent.close()


@asynccontextmanager
async def opened(program: Program, parent: ForkServer, seed: int = 3) -> AsyncIterator[Hosted]:
    environment = Hosted(program, parent=parent)
    try:
        await environment.open(TASK, seed=seed)
        yield environment
    finally:
        await environment.close()


async def looked(environment: Hosted) -> dict[str, Any]:
    return json.loads((await use(environment, "look")).text)


def test_episodes_share_what_was_loaded_and_nothing_after_it() -> None:
    async def play() -> None:
        given = counter()
        async with (
            parent_for(given) as parent,
            opened(given, parent) as one,
            opened(given, parent) as other,
        ):
            assert (await use(one, "see", word="a")).text == '["a"]'
            assert (await use(other, "see", word="b")).text == '["b"]'
            assert (await use(one, "see", word="c")).text == '["a", "c"]'
            seen, else_seen = await looked(one), await looked(other)
            assert seen["forked"] and seen["session"]
            assert (seen["word"], else_seen["word"]) == ("c", "b")
            assert seen["temporary"] == one._scratch != else_seen["temporary"]
            # Its channel twice, its standard error, and nothing of the other's or the parent's.
            assert sorted(seen["files"]) == ["/dev/null", "pipe", "pipe", "socket", "socket"]
            assert set(seen["inherited"]) <= {0, 1, 2}, "what a tool starts could answer for it"
            pids = [one._process.pid, other._process.pid]  # pyright: ignore
            assert len(set(pids)) == 2
        assert not any(map(alive, pids))

    run(play())


def test_forked_or_started_an_episode_draws_the_same() -> None:
    async def said(parent: ForkServer | None, seed: int) -> str:
        environment = Hosted(counter(), parent=parent)
        opening = await environment.open(TASK, seed=seed)
        await environment.close()
        return opening.messages[0]["content"]

    async def play() -> None:
        async with parent_for(counter()) as parent:
            forked = [await said(parent, seed) for seed in (5, 5, 6)]
        assert forked == [await said(None, seed) for seed in (5, 5, 6)]
        assert forked[0] == forked[1] != forked[2]

    run(play())


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("thread", "starts 1 thread"),
        ("file", "opens /"),
        ("process", "starts a process"),
        ("memory", "maps shared memory"),
    ],
)
def test_what_a_fork_would_share_is_seen_and_a_process_started(how: str, why: str) -> None:
    async def play() -> None:
        given = counter(how)
        async with parent_for(given) as parent, opened(given, parent) as environment:
            assert why in parent.why_not
            assert not (await looked(environment))["forked"]
            assert parent._running is None

    run(play())


def test_a_program_that_is_not_to_be_forked() -> None:
    assert fork_server_for(counter(preload=False)) is None


@pytest.mark.parametrize(
    ("how", "fault", "why"),
    [
        ("hang", "hang", "open did not end within 0.5 s"),
        ("exit", "exit", "exited with status 3; its last words: my last words"),
        ("crash", "crash", "was ended by SIGSEGV"),
        ("raise", "start", "cannot be imported: RuntimeError: not today"),
    ],
)
def test_a_program_that_does_not_load_fails_as_without_a_parent(
    how: str, fault: str, why: str
) -> None:
    async def play() -> None:
        given = counter(how)
        async with parent_for(given) as parent:
            parent._timeout_s = 0.5 if how == "hang" else PATIENCE_S
            for _ in range(2):
                with pytest.raises(EnvironmentLost) as caught:
                    async with opened(given, parent):
                        raise AssertionError("it opened")
                assert (caught.value.fault, caught.value.during) == (fault, "open")
                assert why in str(caught.value)

    run(play())


def test_all_who_wait_for_a_program_that_does_not_load_wait_once() -> None:
    async def play() -> None:
        given = counter("hang")
        async with parent_for(given) as parent:
            parent._timeout_s, starts, start = 1.0, [], parent._start

            async def counted() -> None:
                starts.append(1)
                await start()

            parent._start = counted
            tried = (parent.fork({}) for _ in range(20))
            ended = await asyncio.gather(*tried, return_exceptions=True)
            assert {str(one) for one in ended} == {str(ended[0])} and len(starts) == 1
            assert isinstance(ended[0], EnvironmentLost) and ended[0].fault == "hang"
            with pytest.raises(EnvironmentLost):  # who comes later tries again
                await parent.fork({})
            assert len(starts) == 2

    run(play())


@pytest.mark.parametrize("how", ["crash", "exit", "hang"])
def test_one_that_ends_takes_no_other_along(how: str) -> None:
    async def play() -> None:
        given = counter()
        async with parent_for(given) as parent, opened(given, parent) as sibling:
            async with opened(given, parent) as environment:
                with pytest.raises(EnvironmentLost) as caught:
                    await use(environment, "end", 0.3 if how == "hang" else PATIENCE_S, how=how)
                assert caught.value.fault == how
                what = {"crash": "SIGSEGV", "exit": "status 3", "hang": "0.3 s"}
                assert what[how] in str(caught.value)
            assert (await use(sibling, "see", word="a")).text == '["a"]'
            assert (await sibling.verdict(transcript())).parts == {"correct": 1.0}  # pyright: ignore

    run(play())


@pytest.mark.parametrize("how", ["close", "hang", "exit"])
def test_whatever_it_started_ends_with_it(how: str) -> None:
    async def play() -> None:
        given = program()
        async with parent_for(given) as parent:
            async with opened(given, parent) as environment:
                helpers = json.loads((await use(environment, "hire")).text)
                assert len(helpers) == 2 and all(map(alive, helpers))
                if how != "close":
                    with pytest.raises(EnvironmentLost):
                        limit_s = 0.3 if how == "hang" else PATIENCE_S
                        await use(environment, "wait", limit_s, seconds=0, then=how)
            # One that had left the group is found only below a parent that lives.
            wait_for(lambda: not any(map(alive, helpers[:1] if how == "exit" else helpers)))
            assert parent._running is not None
            assert not below(parent._running._child.pid)
            for pid in filter(alive, helpers):
                os.kill(pid, signal.SIGKILL)

    run(play())


def test_where_the_parent_ends_there_is_another() -> None:
    async def play() -> None:
        given = counter()
        async with parent_for(given) as parent:
            async with opened(given, parent) as environment, opened(given, parent) as sibling:
                with pytest.raises(EnvironmentLost):
                    await use(environment, "end", how="parent")
                with pytest.raises(EnvironmentLost, match="forked from has ended") as caught:
                    await use(sibling, "look")
                assert caught.value.during == "parent"  # at no call of its policy's
            with pytest.raises(EnvironmentLost):
                async with opened(given, parent):
                    raise AssertionError("it opened")
            async with opened(given, parent) as environment:
                assert (await looked(environment))["forked"]

    run(play())


def test_without_files_for_one_episode_the_others_stay() -> None:
    async def play() -> None:
        given = counter()
        async with parent_for(given) as parent, opened(given, parent) as sibling:
            running = parent._running
            for free in range(5):  # of the five that it takes
                with few_files(free), pytest.raises(EnvironmentLost, match="Too many open") as lost:
                    await parent.fork({})
                assert (lost.value.fault, lost.value.during) == ("start", "open")
                assert parent._running is running and running is not None
                assert len(below(running._child.pid)) == 1, "an episode that nobody has"
            assert (await looked(sibling))["forked"]
            async with opened(given, parent) as environment:
                assert (await looked(environment))["forked"]

    run(play())


@contextmanager
def few_files(free: int) -> Iterator[None]:
    """So many may be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(free):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def test_a_caller_that_gives_up_leaves_nothing_behind() -> None:
    async def play() -> None:
        given = counter()
        async with parent_for(given) as parent:
            for at in (0.0, 0.01, 0.1, 0.3, 0.0, 0.002, 0.005):
                environment = Hosted(given, parent=parent)
                opening = asyncio.create_task(environment.open(TASK, seed=3))
                await asyncio.sleep(at)
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
                await environment.close()
            async with opened(given, parent) as environment:
                assert (await looked(environment))["forked"]

    run(play())


def test_closing_ends_what_is_open() -> None:
    async def play() -> None:
        given = counter()
        async with parent_for(given) as parent:
            environment = Hosted(given, parent=parent)
            await environment.open(TASK, seed=3)
            assert environment._process is not None
            pid = environment._process.pid
            await parent.close()
            wait_for(lambda: not alive(pid))
            with pytest.raises(EnvironmentLost):
                await use(environment, "look")
            await environment.close()

    run(play())
