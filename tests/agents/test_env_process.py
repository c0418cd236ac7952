"""An environment's process, started or forked: protocol, faults, clean-up, limits."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_process.client import ForkServerClient, ProcessEnvironment
from keel.agents.env_process.launch import EnvironmentProgram
from keel.agents.env_runtime.processes import descendants
from keel.agents.types import EnvironmentLost
from keel.rl.types import Verdict
from tests.agents.episodes import (
    HERE,
    TASK,
    alive,
    asynchronous,
    episode,
    program,
    run,
    use,
)
from tests.waiting import LIMITS_S, PATIENCE_S, wait_for, within_some

pytestmark = pytest.mark.e2e


async def lost(work: Any) -> EnvironmentLost:
    with pytest.raises(EnvironmentLost) as caught:
        await work
    return caught.value


def limits_of(how: str) -> tuple[float, ...]:
    """Return deadlines to try; only a hang must meet one."""
    return LIMITS_S if how == "hang" else (PATIENCE_S,)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "set one of target, command and url"),
        ({"target": "shop:Shop", "url": "http://shop"}, "set one of"),
        ({"target": ":Shop"}, "write module:name"),
        ({"command": ["shop"], "arguments": {"a": 1}}, "arguments"),
    ],
)
def test_settings_that_name_no_environment(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EnvironmentProgram(**settings)


@asynchronous
async def test_episode_from_opening_to_verdict() -> None:
    environment = ProcessEnvironment(program())
    opening = await environment.open(TASK, seed=3)
    (message,) = opening.messages
    assert message["role"] == "user" and message["content"].startswith("p7 3 0.")
    result = await use(environment, "buy", item={"name": "ring"}, pay=3)
    assert (result.text, result.failed) == ("Item ring 1 3.0 cash", False)
    result = await use(environment, "wait", seconds=0, then="done")
    assert (result.text, result.done) == ('{"slept": 0.0, "of": "float"}', True)
    reply = await environment.reply({"role": "assistant", "content": "hello"})
    assert reply == {"role": "user", "content": "you said hello"}
    assert await environment.reply({"role": "assistant", "content": "bye"}) is None
    verdict = await environment.verdict((), "length")
    assert verdict == Verdict(parts={"correct": 1.0}, facts={"ended": "length"})
    await environment.close()
    assert "is not open" in (await lost(use(environment, "call"))).detail
    await environment.close()


@asynchronous
async def test_invalid_call_fails_without_running() -> None:
    async with episode() as environment:
        for name, arguments in [
            ("buy", {"item": {"name": "a"}, "how": "theft"}),
            ("wait", {"seconds": float("nan")}),
            ("_maybe", {"at": "call"}),
            ("opening", {}),
        ]:
            assert (await use(environment, name, **arguments)).failed, name
        result = await use(environment, "buy", item={"name": "bomb"})
        assert (result.text, result.failed) == ("ValueError: no bombs here", True)
        results = await asyncio.gather(
            *(use(environment, "buy", item={"name": f"n{i}"}) for i in range(20))
        )
        assert [one.text.split()[1] for one in results] == [f"n{i}" for i in range(20)]


@pytest.mark.parametrize(
    ("how", "at", "reason"),
    [
        ("crash", "open", "SIGSEGV"),
        ("exit", "reply", "status 3"),
        ("garbage", "call", "Welcome!"),
        ("hang", "verdict", "within"),
        ("memory", "verdict", "memory_mib"),
        ("raise", "reply", "the shop burnt down"),
    ],
)
def test_loss_has_reason_and_last_output(how: str, at: str, reason: str) -> None:
    async def play(limit_s: float) -> None:
        environment = ProcessEnvironment(
            program(arguments={"how": how, "at": at}, verdict_s=limit_s)
        )
        with pytest.raises(EnvironmentLost) as caught:
            await environment.open(TASK, seed=3)
            if at == "reply":
                await environment.reply({"role": "assistant", "content": "hello"})
            if at == "call":
                await use(environment, "call")
            await environment.verdict((), "stop")
        error = caught.value
        assert error.during == at and reason in error.detail
        assert "my last words" in error.output
        with pytest.raises(EnvironmentLost) as later:
            await environment.verdict((), "stop")
        await environment.close()
        assert reason in str(later.value) and "my last words" in str(later.value)

    within_some(lambda limit_s: run(play(limit_s)), limits_of(how))


@asynchronous
async def test_invalid_verdicts_and_failing_close() -> None:
    for value in (1.5, "good", None, {"correct": "yes"}):
        arguments = {"verdict": value}
        async with episode("shop:Graded", arguments=arguments) as environment:
            assert isinstance(await environment.verdict((), "stop"), str)
    for how in ("hang", "crash", "raise"):
        close_s = limits_of(how)[0]
        async with episode(arguments={"how": how, "at": "close"}, close_s=close_s):
            pass


@asynchronous
async def test_faults_inside_a_call() -> None:
    for then, reason in {
        "another": "sent an invalid reply",
        "no reason": "sent an invalid reply",
        "late exit": "exited with status 3",
        "memory": "out of memory",
    }.items():
        async with episode(memory_mib=512) as environment:
            error = await lost(use(environment, "wait", seconds=0, then=then))
            assert reason in error.detail, then
    async with episode() as environment:
        assert len((await use(environment, "say", letters=7 << 20)).text) == 7 << 20
        error = await lost(use(environment, "say", letters=9 << 20))
        assert "more than 8 MiB" in error.detail and len(error.output) <= 4096


@asynccontextmanager
async def forking(program: EnvironmentProgram) -> AsyncIterator[ForkServerClient]:
    server = ForkServerClient(program)
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def opened(
    program: EnvironmentProgram, server: ForkServerClient | None, seed: int = 3
) -> AsyncIterator[Any]:
    environment = ProcessEnvironment(program, fork_server=server)
    try:
        await environment.open(TASK, seed=seed)
        yield environment
    finally:
        await environment.close()


@pytest.mark.parametrize(("how", "forked"), [("close", True), ("hang", False), ("exit", True)])
@asynchronous
async def test_descendants_end_with_the_environment(how: str, forked: bool) -> None:
    spec = program(preload=forked)
    server = ForkServerClient(spec)
    async with opened(spec, server) as environment:
        helpers = json.loads((await use(environment, "hire")).text)
        assert len(helpers) == 2 and all(map(alive, helpers))
        if how != "close":
            limit_s = 0.3 if how == "hang" else PATIENCE_S
            await lost(use(environment, "wait", limit_s, seconds=0, then=how))
    # A process that left the group is found only below a living parent.
    gone = helpers[:1] if how == "exit" else helpers
    wait_for(lambda: not any(map(alive, gone)), f"the end of the helpers: {how}")
    if forked:
        assert server._process is not None
        assert not descendants(server._process.pid)
    await server.close()
    for pid in filter(alive, helpers):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("forked", [False, True])
@asynchronous
async def test_cancelled_opening_leaves_nothing(forked: bool) -> None:
    spec = program(preload=forked)
    server = ForkServerClient(spec)
    for seconds in (0.0, 0.01, 0.1, 0.3, 0.0, 0.002, 0.05):
        environment = ProcessEnvironment(spec, fork_server=server)
        opening = asyncio.create_task(environment.open(TASK, seed=3))
        await asyncio.sleep(seconds)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await environment.close()
    async with opened(spec, server) as environment:
        waiting = asyncio.create_task(use(environment, "wait", seconds=100))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert "cancelled" in (await lost(use(environment, "call"))).detail
    await server.close()


@asynchronous
async def test_environment_sees_no_secrets_and_no_keel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_API_KEY", "sesame")

    async with episode(env={"SHOP": "1"}) as environment:
        folder = Path(environment._process.scratch)
        facts = json.loads((await use(environment, "look")).text)
        assert facts["temporary"] == str(folder) and folder.is_dir()
        (folder / "file").write_text("x")
    assert not folder.exists()
    assert "SECRET_API_KEY" not in facts["environ"] and "SHOP" in facts["environ"]
    assert facts["heavy"] == [] and Path(facts["folder"]) == HERE
    allowed = ("keel", "keel.agents")
    assert all(n in allowed or n.startswith("keel.agents.env_runtime") for n in facts["keel"])


def counter(how: str = "", **settings: Any) -> EnvironmentProgram:
    return program("preloaded:Counter", env={"AT_IMPORT": how}, **settings)


async def look(environment: ProcessEnvironment) -> dict[str, Any]:
    return json.loads((await use(environment, "look")).text)


@asynchronous
async def test_forked_episodes_share_only_the_import() -> None:
    async def draws(server: ForkServerClient | None) -> list[str]:
        texts: list[str] = []
        for seed in (5, 5, 6):
            environment = ProcessEnvironment(counter(), fork_server=server)
            texts.append((await environment.open(TASK, seed=seed)).messages[0]["content"])
            await environment.close()
        return texts

    spec = counter()
    async with forking(spec) as server:
        async with opened(spec, server) as one, opened(spec, server) as other:
            assert (await use(one, "see", word="a")).text == '["a"]'
            assert (await use(other, "see", word="b")).text == '["b"]'
            assert (await use(one, "see", word="c")).text == '["a", "c"]'
            facts, other_facts = await look(one), await look(other)
            assert facts["forked"] and facts["session"]
            assert (facts["word"], other_facts["word"]) == ("c", "b")
            assert facts["temporary"] == one._process.scratch != other_facts["temporary"]
            # Its channel twice, its standard error, and nothing of the other's or the server's.
            assert sorted(facts["files"]) == ["/dev/null", "pipe", "pipe", "socket", "socket"]
            assert set(facts["inherited"]) <= {0, 1, 2}, "a tool's child could answer for it"
            pids = [one._process.pid, other._process.pid]
            assert len(set(pids)) == 2
        assert not any(map(alive, pids))
        forked = await draws(server)
    assert forked == await draws(None)
    assert forked[0] == forked[1] != forked[2]


@asynchronous
async def test_shared_state_disables_forking() -> None:
    for how in ("thread", "file", "process", "memory"):
        spec = counter(how)
        async with forking(spec) as server, opened(spec, server) as environment:
            assert not (await look(environment))["forked"], how
            assert server.disabled_reason and server._process is None


class RefusesForks:
    """A sandbox that starts processes, but whose fork server dies at once."""

    fork_isolation, probe = dict[str, Any](), ""

    @contextmanager
    def __call__(self, command: Any, *, readable: Any, forks: bool = False) -> Iterator[Any]:
        outer = ["false"] if forks else ["sh", "-c", '"$@"; exit $?', "sh"]  # ends with its child
        yield [*outer, *command], {}, ()

    def limit_memory(self, pid: int, *, inside: bool) -> Any:
        return lambda: ""


class ReachesMemoryLimit(RefusesForks):
    """A sandbox that reports at the end of a process that it reached its memory limit."""

    def limit_memory(self, pid: int, *, inside: bool) -> Any:
        return lambda: "over memory_mib"


@asynchronous
async def test_memory_limit_during_the_verdict_loses_the_environment() -> None:
    arguments = {"how": "raise", "at": "verdict"}
    async with episode(arguments=arguments) as environment:
        assert "the shop burnt down" in str(await environment.verdict((), "stop"))
    async with episode(arguments=arguments, sandbox=ReachesMemoryLimit()) as environment:
        with pytest.raises(EnvironmentLost, match="over memory_mib"):
            await environment.verdict((), "stop")


@asynchronous
async def test_sandbox_that_refuses_forks_starts_each_episode() -> None:
    spec = replace(counter(), sandbox=RefusesForks())
    async with forking(spec) as server, opened(spec, server) as environment:
        assert not (await look(environment))["forked"]
        assert "does not work here" in server.disabled_reason


@pytest.mark.parametrize("forked", [False, True])
def test_abandoned_process_ends_with_the_interpreter(forked: bool) -> None:
    code = (
        "import asyncio\n"
        "from tests.agents import test_env_process as t\n"
        "async def start():\n"
        f"    spec = t.program(preload={forked})\n"
        "    environment = t.ProcessEnvironment(spec, fork_server=t.ForkServerClient(spec))\n"
        "    await environment.open(t.TASK, seed=3)\n"
        "    return environment\n"
        "print((environment := asyncio.run(start()))._process.pid)"
    )
    command = [sys.executable, "-c", code]
    pid = int(subprocess.check_output(command, cwd=HERE.parents[1], timeout=PATIENCE_S))
    wait_for(lambda: not alive(pid))


def test_abandoned_command_ends_with_the_interpreter() -> None:
    code = (
        "import asyncio\n"
        "from keel.agents.env_process.launch import ProcessSettings, launch\n"
        "async def start():\n"
        "    return launch(['sleep', '1000'], ProcessSettings(), env={})\n"
        "print((process := asyncio.run(start())).pid)"
    )
    pid = int(subprocess.check_output([sys.executable, "-c", code], timeout=PATIENCE_S))
    wait_for(lambda: not alive(pid))


@asynchronous
async def test_fault_spares_the_siblings_unless_the_server_dies() -> None:
    spec = counter()
    async with forking(spec) as server:
        async with opened(spec, server) as sibling:
            endings = {"crash": "SIGSEGV", "exit": "status 3", "hang": "within 0.3 s"}
            for how, reason in endings.items():
                async with opened(spec, server) as environment:
                    limit_s = 0.3 if how == "hang" else PATIENCE_S
                    error = await lost(use(environment, "end", limit_s, how=how))
                    assert reason in error.detail
            assert (await use(sibling, "see", word="a")).text == '["a"]'
            assert (await sibling.verdict((), "stop")).parts == {"correct": 1.0}
            async with opened(spec, server) as environment:
                await lost(use(environment, "end", how="parent"))
            error = await lost(use(sibling, "look"))
            assert error.during == "parent", "it must not count as the policy's"
        async with opened(spec, server) as environment:
            assert (await look(environment))["forked"]
            pid = environment._process.pid
            await server.close()
            wait_for(lambda: not alive(pid))
            await lost(use(environment, "look"))
