"""Episodes of the code environment, on a tiny project."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from keel.agents.env_process.client import Hosted
from keel.agents.env_process.fork_server import fork_server_for
from keel.agents.env_process.program import Program
from keel.agents.types import Unscored
from keel.rl.types import Prompt
from keel.synthesis.code.sandboxes import CodeSandboxes, Prefix, instance_of
from tests.agents.episodes import PATIENT, transcript, use
from tests.agents.sandboxes import wrap_of
from tests.synthesis.code.projects import SETUP, TEST, candidate, config, source
from tests.waiting import PATIENCE_S

HIDDEN = "test_the_hidden_one"
WHERE = "pytest::tests.test_adding::test_"
Open = Callable[[], AbstractAsyncContextManager[Hosted]]


def instance(folder: Path) -> dict[str, Any]:
    """Return the reward spec of a task whose prefix and sealed file are made in `folder`."""
    rooms = CodeSandboxes(config(source()), folder)
    (rooms.folder / "prefixes" / "p" / "bin").mkdir(parents=True)
    script = SETUP.split("printf '")[1].split("' >")[0].replace("\\n", "\n")
    program = rooms.folder / "prefixes" / "p" / "bin" / "python"
    program.write_text(script)
    program.chmod(0o755)
    (rooms.folder / "packages" / "p.json").write_text("{}")
    built = Prefix(name="p", setup="", test=TEST)
    spec = instance_of(candidate(), built, tests_s=PATIENCE_S)
    spec["env"] = {}  # one of the attacks is a plugin
    spec |= {"f2p": [WHERE + "the_hidden_one"], "p2p": [WHERE + "some"], "canary": True}
    return rooms.sealed("one", spec)


@asynccontextmanager
async def opened(folder: Path) -> AsyncGenerator[Open]:
    """Yield a function that opens an episode, forked from one process."""
    wrap_of()
    reward = instance(folder)
    where = (folder / "environment").absolute()
    program = Program(
        target="keel.agents.environments.code.environment:Repository",
        folder=where,
        arguments={"folder": str(where)},
        deadlines=PATIENT,
        wrap=wrap_of(memory_mib=2048),
    )
    parent = fork_server_for(program)
    assert parent is not None

    @asynccontextmanager
    async def episode() -> AsyncGenerator[Hosted]:
        hosted = Hosted(program, fork_server=parent)
        task = Prompt(
            prompt_id="one",
            domain="code",
            messages=({"role": "user", "content": "Resolve it."},),
            reward=reward,
        )
        try:
            await hosted.open(task, seed=1)
            assert not parent.disabled_reason, parent.disabled_reason
            yield hosted
        finally:
            await hosted.close()

    try:
        yield episode
    finally:
        await parent.close()


async def bash(hosted: Hosted, command: str) -> str:
    result = await use(hosted, "bash", command=command)
    assert not result.failed, result.text
    return result.text


async def worth(hosted: Hosted) -> tuple[float, dict[str, Any]]:
    """Return the reward and the facts."""
    judged = await hosted.verdict(transcript())
    assert not isinstance(judged, Unscored), judged.reason
    return judged.parts["correct"], dict(judged.facts)
