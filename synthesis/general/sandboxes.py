"""Runs the author's code in sandboxes."""

import asyncio
import json
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

from keel.agents.env_process.client import ForkServer, Hosted, fork_server_for
from keel.agents.env_process.process import Deadlines, EnvSandbox, Program
from keel.agents.types import EnvironmentLost, Opening
from keel.configs.schema import ConfigError
from keel.configs.synthesis import GeneralConfig
from keel.rewards.sandbox.bubblewrap import IsolationError
from keel.rewards.sandbox.environments import Network, environment_wrap
from keel.rl.turns import ToolCall
from keel.rl.types import Prompt
from keel.synthesis.ledger import Rejected

_PACKAGE = "keel.agents.environments.general"
_MEMORY_MIB = 2048
_STARTING = 8
SLACK_S = 30.0
"""Seconds added to the time limits inside the sandbox."""


def _sandbox(network: Network) -> EnvSandbox:
    try:
        wrap = environment_wrap(
            "bubblewrap", memory_mib=_MEMORY_MIB, processes=64, network=network, knob=""
        )
    except IsolationError as error:
        raise ConfigError(f"family = general needs a sandbox: {error}") from error
    assert wrap is not None
    return wrap


class GeneralSandboxes:
    """Opens sandboxes that can only read the folder `making`. Use it as an async context
    manager."""

    def __init__(self, making: Path, config: GeneralConfig) -> None:
        self.making, self.config = making, config
        making.mkdir(parents=True, exist_ok=True)
        making.chmod(0o755)  # as root, Keel runs the sandbox as another user
        self._wraps = {False: _sandbox("none")}
        if config.network:
            self._wraps[True] = _sandbox("host")
        self._starting = asyncio.Semaphore(_STARTING)
        self._parent: ForkServer | None = None

    async def __aenter__(self) -> Self:
        self._parent = fork_server_for(self._program("environment:General", {}))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._parent is not None:
            await self._parent.close()

    def _program(
        self,
        target: str,
        arguments: Mapping[str, Any],
        hash_seed: int | None = None,
        network: bool = False,
    ) -> Program:
        return Program(
            target=f"{_PACKAGE}.{target}",
            arguments=arguments,
            folder=self.making,
            env={} if hash_seed is None else {"PYTHONHASHSEED": str(hash_seed)},
            memory_mib=_MEMORY_MIB,
            deadlines=Deadlines(
                open_s=self.config.call_s + SLACK_S, verdict_s=self.config.verify_s + SLACK_S
            ),
            wrap=self._wraps[network],
        )

    @asynccontextmanager
    async def open(
        self,
        target: str,
        *,
        reward: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        hash_seed: int | None = None,
        network: bool = False,
        seed: int = 0,
    ) -> AsyncGenerator[tuple[Hosted, Opening]]:
        """Open an environment of the package and yield it with its first messages and tools.
        `hash_seed` is the Python hash seed of its process. Raises EnvironmentLost if the
        environment crashes or hangs."""
        program = self._program(target, arguments or {}, hash_seed, network)
        parent = self._parent if hash_seed is None and not network else None
        hosted = Hosted(program, starting=self._starting, fork_server=parent)
        task = Prompt(
            prompt_id="task/0",
            domain="general",
            messages=({"role": "user", "content": "?"},),
            reward=dict(reward or {}),
        )
        try:
            yield hosted, await hosted.open(task, seed=seed)
        finally:
            await hosted.close()

    async def workshop(
        self,
        gate: str,
        environment: Path,
        name: str,
        *,
        each_s: float,
        times: int = 1,
        arguments: Mapping[str, Any] | None = None,
        hash_seed: int | None = None,
        seed: int = 0,
    ) -> Any:
        """Call a method of `AuthorWorkshop` in a sandbox and return its result. The method runs the
        author's code `times` times, each with the timeout `each_s`. Raises Rejected with the name
        `gate` if that code fails."""
        called = ToolCall(call_id="c", name=name, arguments=dict(arguments or {}))
        reward = {"environment": str(environment), "within_s": each_s}
        with reject_crashes(gate):
            async with self.open(
                "environment:AuthorWorkshop", reward=reward, hash_seed=hash_seed, seed=seed
            ) as (hosted, _):
                result = await hosted.call(called, timeout_s=times * each_s + SLACK_S)
        if result.failed:
            raise Rejected(gate, result.text.removeprefix("Rejected: "))
        return json.loads(result.text)


@contextmanager
def reject_crashes(gate: str) -> Generator[None]:
    """Raise Rejected with the name `gate` if code in a sandbox crashes or hangs it."""
    try:
        yield
    except EnvironmentLost as error:
        if error.during == "parent":
            raise
        raise Rejected(gate, error.detail) from error
