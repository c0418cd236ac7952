"""An environment's process: what it is told and tells, and that whatever it does ends in words."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_process import children
from keel.agents.env_process.client import Hosted
from keel.agents.types import EnvironmentLost, Unscored
from keel.rl.turns import ToolCall
from keel.rl.types import Verdict
from tests.agents.episodes import (
    HERE,
    PATIENT,
    TASK,
    alive,
    episode,
    program,
    run,
    transcript,
    use,
)
from tests.waiting import LIMITS_S, PATIENCE_S, wait_for, within_some

pytestmark = pytest.mark.e2e

FAULTS = {"crash": "was ended by SIGSEGV", "exit": "exited with status 3", "garbage": "Welcome!"}
FAULTS["hang"] = "did not end within"


async def lost(work: Any) -> EnvironmentLost:
    with pytest.raises(EnvironmentLost) as caught:
        await work
    return caught.value


def limits_of(how: str) -> tuple[float, ...]:
    """Only what hangs is to run into one."""
    return LIMITS_S if how == "hang" else (PATIENCE_S,)


def test_an_episode_from_its_opening_to_its_verdict() -> None:
    async def play() -> None:
        environment = Hosted(program())
        opening = await environment.open(TASK, seed=3)
        (message,) = opening.messages
        assert message["role"] == "user" and message["content"].startswith("p7 3 0.")
        assert "buy" in [tool.name for tool in opening.tools]
        result = await use(environment, "buy", item={"name": "ring"}, pay=3)
        assert (result.text, result.failed) == ("Item ring 1 3.0 cash ", False)
        result = await use(environment, "wait", seconds=0, then="done")
        assert (result.text, result.done) == ('{"slept": 0.0, "of": "float"}', True)
        reply = await environment.reply({"role": "assistant", "content": "hello"})
        assert reply == {"role": "user", "content": "you said hello"}
        assert await environment.reply({"role": "assistant", "content": "bye"}) is None
        verdict = await environment.verdict(transcript(finish_reason="length"))
        assert verdict == Verdict(parts={"correct": 1.0}, facts={"ended": "length"})
        await environment.close()
        await environment.close()
        assert (await lost(use(environment, "call"))).fault == "closed"
        assert (await lost(environment.open(TASK, seed=3))).fault == "closed"

    run(play())


def test_the_seed_decides_what_is_drawn() -> None:
    async def play() -> list[str]:
        said: list[str] = []
        for seed in (5, 5, 6):
            environment = Hosted(program())
            said.append((await environment.open(TASK, seed=seed)).messages[0]["content"][5:])
            await environment.close()
        return said

    first, again, other = run(play())
    assert first == again
    (drawn, hashed), (drawn_else, hashed_else) = first.split(), other.split()
    assert drawn != drawn_else
    assert hashed == hashed_else  # the same whether a process was started or forked


def test_a_call_that_cannot_be_is_answered_and_not_run() -> None:
    async def play() -> None:
        async with episode() as environment:
            for name, arguments, why in [
                ("byu", {}, "did you mean buy?"),
                ("buy", {}, "'item' is a required property"),
                ("buy", {"item": 3}, "3 is not of type 'object' (at $.item)"),
                ("buy", {"item": {"name": "a"}, "how": "theft"}, "is not one of ['cash', 'card']"),
                ("buy", {"item": {"name": "a"}, "price": 1}, "Additional properties"),
                ("wait", {"seconds": float("nan")}, "is no JSON"),
                ("_maybe", {"at": "call"}, "there is no tool"),
                ("opening", {}, "there is no tool"),
            ]:
                result = await use(environment, name, **arguments)
                assert result.failed and why in result.text, result
            listed = ToolCall(call_id="1", name="buy", arguments=[1])  # type: ignore[arg-type]
            assert "must be an object" in (await environment.call(listed, timeout_s=1)).text
            result = await use(environment, "buy", item={"name": "bomb"})
            assert (result.text, result.failed) == ("ValueError: no bombs here", True)
            assert (await use(environment, "call", float("inf"))).text == "fine"

    run(play())


@pytest.mark.parametrize(("how", "at"), list(itertools.product(FAULTS, ("open", "call", "reply"))))
def test_a_fault_ends_in_a_typed_error_with_its_last_words(how: str, at: str) -> None:
    async def play(limit_s: float) -> None:
        opening_s = limit_s if at == "open" else PATIENCE_S
        deadlines = replace(PATIENT, open_s=opening_s, reply_s=limit_s)
        environment = Hosted(program(arguments={"how": how, "at": at}, deadlines=deadlines))
        if at == "open":
            error = await lost(environment.open(TASK, seed=3))
        else:
            await environment.open(TASK, seed=3)
            said = {"role": "assistant", "content": "hello"}
            asked = environment.reply(said) if at == "reply" else use(environment, "call", limit_s)
            error = await lost(asked)
            left = await environment.verdict(transcript())
            assert isinstance(left, Unscored) and "lost before this" in left.reason
        await environment.close()
        assert (error.fault, error.during) == (how, at)
        assert FAULTS[how] in str(error) and error.words.endswith("my last words")

    within_some(lambda limit_s: run(play(limit_s)), limits_of(how))


@pytest.mark.parametrize("how", [*FAULTS, "raise", "memory"])
def test_a_grader_that_fails_is_no_zero(how: str) -> None:
    async def play(limit_s: float) -> None:
        given = {"how": how, "at": "verdict"}
        deadlines = replace(PATIENT, verdict_s=limit_s)
        async with episode(arguments=given, deadlines=deadlines) as environment:
            verdict = await environment.verdict(transcript())
            assert isinstance(verdict, Unscored)
            assert (FAULTS | {"raise": "burnt down", "memory": "memory"})[how] in verdict.reason
            assert "my last words" in verdict.reason

    within_some(lambda limit_s: run(play(limit_s)), limits_of(how))


@pytest.mark.parametrize("how", [*FAULTS, "raise"])
def test_closing_always_ends_it(how: str) -> None:
    async def play() -> None:
        deadlines = replace(PATIENT, close_s=limits_of(how)[0])
        environment = Hosted(program(arguments={"how": how, "at": "close"}, deadlines=deadlines))
        await environment.open(TASK, seed=3)
        await environment.close()

    run(play())


@pytest.mark.parametrize(
    ("target", "given", "why"),
    [
        ("shop:Graded", 1.5, "must be a number from 0 to 1"),
        ("shop:NotANumber", None, "must be a number from 0 to 1"),
        ("shop:Graded", "good", "'good'"),
        ("shop:Graded", None, "returned None"),
        ("shop:Graded", [1.0], "must be a number"),
        ("shop:Graded", {"correct": "yes"}, "must be a number"),
    ],
)
def test_a_verdict_that_is_none(target: str, given: Any, why: str) -> None:
    async def play() -> Any:
        async with episode(target, arguments={"verdict": given}) as environment:
            return await environment.verdict(transcript())

    verdict = run(play())
    assert isinstance(verdict, Unscored) and why in verdict.reason


def test_a_reply_to_another_request_is_none() -> None:
    async def play() -> None:
        async with episode() as environment:
            error = await lost(use(environment, "wait", seconds=0, then="another"))
            assert error.fault == "garbage" and "'id': 99" in str(error)

    run(play())


def test_one_that_takes_long_to_end_still_says_how() -> None:
    async def play() -> None:
        async with episode() as environment:
            error = await lost(use(environment, "wait", seconds=0, then="late exit"))
            assert error.fault == "exit" and "exited with status 3" in str(error)

    run(play())


def test_memory_and_large_messages() -> None:
    async def play() -> None:
        async with episode(memory_mib=512) as environment:
            error = await lost(use(environment, "wait", seconds=0, then="memory"))
            assert error.fault == "memory" and "memory_mib = 512" in str(error)
        async with episode() as environment:
            assert len((await use(environment, "say", letters=7 << 20)).text) == 7 << 20
            error = await lost(use(environment, "say", letters=9 << 20))
            assert error.fault == "large" and "more than 8 MiB" in str(error)

    run(play())


def test_whatever_it_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kill_below = children.kill_below

    def late(pid: int) -> None:
        """On a busy machine the program has had time to end by itself."""
        time.sleep(0.05)
        kill_below(pid)

    monkeypatch.setattr(children, "kill_below", late)

    async def play() -> None:
        for how in ("close", "hang", "exit"):
            async with episode() as environment:
                helpers = list(map(int, (await use(environment, "hire")).text[1:-1].split(",")))
                assert len(helpers) == 2 and all(map(alive, helpers))
                if how != "close":
                    error = await lost(
                        use(environment, "wait", limits_of(how)[0], seconds=0, then=how)
                    )
                    assert error.fault == how
            # One that had left the group is found only below a parent that lives.
            gone = helpers[:1] if how == "exit" else helpers
            wait_for(
                lambda gone=gone: not any(map(alive, gone)), f"the end of what it started: {how}"
            )
            for pid in filter(alive, helpers):
                os.kill(pid, signal.SIGKILL)

    run(play())


def test_a_caller_that_gives_up_leaves_nothing_behind() -> None:
    async def play() -> None:
        for at in (0.0, 0.01, 0.05, 0.2):
            environment = Hosted(program())
            opening = asyncio.create_task(environment.open(TASK, seed=3))
            await asyncio.sleep(at)
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            await environment.close()
        async with episode() as environment:
            waiting = asyncio.create_task(use(environment, "wait", seconds=100))
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert "given up" in str(await lost(use(environment, "call")))

    run(play())


def test_giving_up_on_a_process_that_has_just_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(**_: Any) -> Any:
        await asyncio.sleep(1000)

    async def play() -> None:
        environment = Hosted(program())
        opening = asyncio.create_task(environment.open(TASK, seed=3))
        await asyncio.sleep(0.05)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await environment.close()

    monkeypatch.setattr(asyncio, "open_unix_connection", never)
    run(play())


def test_calls_of_one_episode_wait_for_each_other() -> None:
    async def play() -> None:
        async with episode() as environment:
            said = await asyncio.gather(
                *(use(environment, "buy", item={"name": f"n{i}"}) for i in range(20))
            )
            assert [result.text.split()[1] for result in said] == [f"n{i}" for i in range(20)]

    run(play())


def test_many_at_once_share_nothing() -> None:
    async def one(seed: int, starting: asyncio.Semaphore) -> str:
        environment = Hosted(program(), starting=starting)
        try:
            await environment.open(TASK, seed=seed)
            assert not (await use(environment, "wait", seconds=0.2)).failed
            assert not (await use(environment, "buy", item={"name": "ring"})).failed
            verdict = await environment.verdict(transcript())
            assert isinstance(verdict, Verdict) and verdict.parts["correct"] == 1.0
            return "fine"
        finally:
            await environment.close()

    async def play() -> None:
        starting = asyncio.Semaphore(3)
        assert set(await asyncio.gather(*(one(seed, starting) for seed in range(7)))) == {"fine"}

    run(play())


def test_what_it_leaves_in_its_temporary_folder_goes() -> None:
    async def play() -> None:
        for left in (False, True):
            async with episode() as environment:
                folder = Path(environment._scratch)
                assert folder.is_dir()
                assert (await use(environment, "look")).text.count(str(folder)) == 1
                if left:
                    (folder / "deep").mkdir()
                    (folder / "deep" / "file").write_text("x")
            assert not folder.exists()

    run(play())


def test_what_an_environment_sees() -> None:
    async def play() -> dict[str, Any]:
        async with episode(env={"SHOP": "1"}) as environment:
            return eval((await use(environment, "look")).text)

    os.environ["SECRET_API_KEY"] = "sesame"
    try:
        seen = run(play())
    finally:
        del os.environ["SECRET_API_KEY"]
    assert "SECRET_API_KEY" not in seen["environ"] and "SHOP" in seen["environ"]
    assert seen["heavy"] == [] and Path(seen["folder"]) == HERE
    assert all(
        name in ("keel", "keel.agents") or name.startswith("keel.agents.env_runtime")
        for name in seen["keel"]
    )


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Also while it hangs, and though nobody could close it."""
    code = (
        "import asyncio, os; from tests.agents.episodes import *\n"
        "async def play():\n"
        "    environment = Hosted(program()); await environment.open(TASK, seed=3)\n"
        "    print(environment._process.pid, flush=True)\n"
        "    await use(environment, 'wait', seconds=0, then='hang')\n"
        "asyncio.run(play())"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        assert alive(pid)
        time.sleep(0.1)
        child.kill()
    wait_for(lambda: not alive(pid))
