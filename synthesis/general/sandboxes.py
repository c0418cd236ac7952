"""Runs the author's code in sandboxes: while it builds a database, in the gates that its tools and
tasks have to pass, and in episodes."""

import asyncio
import json
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

from keel.agents.env_process.client import ForkServerClient, ProcessEnvironment
from keel.agents.env_process.launch import EnvironmentProgram, EnvSandbox
from keel.agents.environments.general.workshop import MAX_SOLUTIONS, MAX_VERDICTS
from keel.agents.types import ArgumentValidator, EnvironmentLost, Opening
from keel.configs.schema import ConfigError
from keel.configs.synthesis import GeneralConfig
from keel.rewards.sandbox.bubblewrap import IsolationError
from keel.rewards.sandbox.environments import Network, environment_sandbox
from keel.rl.turns import ToolCall, ToolSpec
from keel.rl.types import Prompt
from keel.synthesis.ledger import Rejected

_WORKSHOP = "workshop:Workshop"
_MEMORY_MIB = 2048
_STARTING = 8
SLACK_S = 30.0
"""Seconds added to the time limits inside the sandbox."""


class GeneralSandboxes:
    """Opens sandboxes that can only read the folder `making`. Use it as an async context
    manager."""

    def __init__(self, making: Path, config: GeneralConfig) -> None:
        self.making, self.config = making, config
        making.mkdir(parents=True, exist_ok=True)
        making.chmod(0o755)  # as root, Keel runs the sandbox as another user
        self._sandboxes = {False: _sandbox("none")}
        if config.network:
            self._sandboxes[True] = _sandbox("host")
        self._starting = asyncio.Semaphore(_STARTING)
        self._parent = ForkServerClient(self._program(_WORKSHOP))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._parent.close()

    def _program(
        self, target: str, *, network: bool = False, readable: Sequence[Path] = (), **arguments: Any
    ) -> EnvironmentProgram:
        return EnvironmentProgram(
            target=f"keel.agents.environments.general.{target}",
            arguments=arguments,
            folder=self.making,
            readable=readable,
            memory_mib=_MEMORY_MIB,
            open_s=self.config.call_s + SLACK_S,
            verdict_s=self.config.verify_s + SLACK_S,
            sandbox=self._sandboxes[network],
        )

    @asynccontextmanager
    async def _open(
        self, program: EnvironmentProgram, reward: Mapping[str, Any] | None = None, *, seed: int = 0
    ) -> AsyncGenerator[tuple[ProcessEnvironment, Opening]]:
        # The fork server's processes have no network and read no documents.
        own = program.readable or program.sandbox is not self._sandboxes[False]
        environment = ProcessEnvironment(
            program, starting=self._starting, fork_server=None if own else self._parent
        )
        task = Prompt(
            prompt_id="task/0",
            domain="general",
            messages=({"role": "user", "content": "?"},),
            reward=dict(reward or {}),
        )
        try:
            yield environment, await environment.open(task, seed=seed)
        finally:
            await environment.close()

    def open_desk(self) -> AbstractAsyncContextManager[tuple[ProcessEnvironment, Opening]]:
        """Open the environment in which the author builds a database."""
        config = self.config
        program = self._program(
            "workshop:DatabaseDesk",
            network=config.network,
            readable=(Path(config.documents),) if config.documents else (),
            most_kib=config.database_kib,
            bash_s=config.bash_s,
        )
        return self._open(program)

    def open_episode(
        self, environment: Path, number: int
    ) -> AbstractAsyncContextManager[tuple[ProcessEnvironment, Opening]]:
        """Open the environment the same way as for an episode of the policy."""
        program = self._program(
            "environment:General", folder=str(environment), verify_s=self.config.verify_s
        )
        return self._open(program, {"general": {"task": number}})

    async def workshop(
        self,
        gate: str,
        environment: Path,
        name: str,
        *,
        within_s: float,
        seed: int = 0,
        **arguments: Any,
    ) -> Any:
        """Call a method of `Workshop` in a sandbox and return its result. Raises Rejected with the
        name `gate` if the author's code fails."""
        call = ToolCall(call_id="c", name=name, arguments=arguments)
        config = self.config
        limits = {"call_s": config.call_s, "solve_s": config.solve_s, "verify_s": config.verify_s}
        reward = {"environment": str(environment), **limits}
        with reject_crashes(gate):
            async with self._open(self._program(_WORKSHOP), reward, seed=seed) as (workshop, _):
                result = await workshop.call(call, timeout_s=within_s + SLACK_S)
        if result.failed:
            raise Rejected(gate, result.text)
        return json.loads(result.text)

    async def describe(self, environment: Path) -> Mapping[str, Mapping[str, Any]]:
        """Check that all tools have type hints, docstrings and valid schemas, and return each
        tool's description, its parameters, and whether it returns `text` or `json`, by name."""
        specs: dict[str, dict[str, Any]] = await self.workshop(
            "typed", environment, "describe", within_s=self.config.call_s
        )
        try:
            keys = ("name", "description", "parameters")
            ArgumentValidator([ToolSpec(**{k: one[k] for k in keys}) for one in specs.values()])
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise Rejected("typed", f"the tools' schemas: {error}") from error
        return specs

    async def check(
        self,
        environment: Path,
        number: int,
        specs: Mapping[str, Mapping[str, Any]],
        earlier: Sequence[Any],
        *,
        again: bool = False,
        seed: int,
    ) -> tuple[Any, int]:
        """Run task `number` through the gates of `Workshop.check`. Returns the solution's answer
        and its number of tool calls. Raises Rejected if a gate rejects the task."""
        config = self.config
        solutions = MAX_SOLUTIONS + len(earlier)
        verify_s = (MAX_VERDICTS + len(earlier)) * config.verify_s
        checked: dict[str, Any] = await self.workshop(
            "solution",
            environment,
            "check",
            within_s=solutions * (config.solve_s + config.call_s) + verify_s,
            seed=seed,
            number=number,
            specs=dict(specs),
            earlier=list(earlier),
            again=again,
        )
        if "gate" in checked:
            raise Rejected(checked["gate"], checked["reason"])
        return checked["answer"], checked["calls"]


def _sandbox(network: Network) -> EnvSandbox:
    try:
        sandbox = environment_sandbox(
            "bubblewrap", memory_mib=_MEMORY_MIB, processes=64, network=network, knob=""
        )
    except IsolationError as error:
        raise ConfigError(f"family = general needs a sandbox: {error}") from error
    assert sandbox is not None
    return sandbox


@contextmanager
def reject_crashes(gate: str) -> Generator[None]:
    """Raise Rejected with the name `gate` if code in a sandbox crashes or hangs."""
    try:
        yield
    except EnvironmentLost as error:
        if error.during == "parent":
            raise
        raise Rejected(gate, error.detail) from error
