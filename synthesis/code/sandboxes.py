"""Stores task candidates as encrypted instance files, and runs them in sandboxes."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from keel.agents.env_process.client import Hosted
from keel.agents.env_process.program import Deadlines, Program
from keel.agents.environments.code.languages import matches
from keel.agents.environments.code.tree import Entry, Tree, overlay, seal, tree_as_json
from keel.agents.types import EnvironmentLost
from keel.configs.schema import ConfigError
from keel.configs.synthesis import CodeTasksConfig
from keel.rewards.sandbox.bubblewrap import IsolationError
from keel.rewards.sandbox.environments import EnvironmentSandbox, environment_wrap
from keel.rl.turns import ToolCall
from keel.rl.types import ENVIRONMENT, Prompt
from keel.synthesis.code.candidate import Candidate
from keel.synthesis.ledger import Rejected

_OPEN_S = 180.0
AROUND_S = 180.0
"""Seconds added to the test timeout of a call, for the work before and after the tests."""
_SETUP_FILES_MIB = 2048
_PACKAGE = "keel.agents.environments.code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A project's installed dependencies and its test command."""

    name: str
    """Name of the prefix's folder in `prefixes`."""
    setup: str
    test: str
    generated: Tree = field(default_factory=dict[str, Entry])
    """Files that the set-up created in the repository."""


def instance_of(candidate: Candidate, built: Prefix, tests_s: float) -> dict[str, Any]:
    """Return a candidate's instance without the gold patch and the test names."""
    base = overlay(built.generated, candidate.base)
    changed = sorted(path for path in candidate.test_files() if candidate.after.get(path))
    # Patterns for the name of a file, not of its folder.
    patterns = [one for one in candidate.language.tests if not one.endswith("/") and "*" in one]
    at_the_end = candidate.language.canary_at_the_end
    return {
        "language": candidate.source.language,
        "project": candidate.project,
        "prefix": built.name,
        "test": built.test,
        "tests_s": tests_s,
        "env": dict(candidate.source.env),
        "base": tree_as_json(base),
        "harness": tree_as_json(_there(candidate.harness)),
        "harness_gone": _gone(candidate.harness),
        "canary_in": changed[0].rpartition("/")[0] if changed else "",
        "canary_at": [path for path in changed if at_the_end and matches(path, patterns)],
        "canary": False,
        "f2p": [],
        "p2p": [],
    }


def with_gold(instance: Mapping[str, Any], candidate: Candidate) -> dict[str, Any]:
    gold = candidate.gold
    return {**instance, "gold": tree_as_json(_there(gold)), "gold_gone": _gone(gold)}


def _there(changed: Mapping[str, Entry | None]) -> Tree:
    return {path: entry for path, entry in changed.items() if entry is not None}


def _gone(changed: Mapping[str, Entry | None]) -> list[str]:
    return [path for path, entry in changed.items() if entry is None]


class CodeSandboxes:
    """Opens the sandboxes for one folder of tasks. There are sandboxes for episodes, and sandboxes
    with network access for set-ups."""

    def __init__(self, config: CodeTasksConfig, folder: Path) -> None:
        """Prepare the sandboxes. They can read only `folder/environment`. Raises ConfigError if
        this machine cannot run them."""
        self.folder = (folder / "environment").absolute()
        for name in ("sealed", "prefixes", "packages"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._config = config
        self.python = config.python or cast(Any, sys)._base_executable
        self._closed = self._wrap()

    def _wrap(self, network: Literal["none", "host"] = "none", **more: Any) -> EnvironmentSandbox:
        try:
            wrap = environment_wrap(
                "bubblewrap", memory_mib=self._config.memory_mib, network=network, knob="", **more
            )
        except IsolationError as error:
            raise ConfigError(f"family = code needs a sandbox: {error}") from error
        assert wrap is not None
        return wrap

    @asynccontextmanager
    async def episode(self, reward: Mapping[str, Any]) -> AsyncGenerator[Hosted]:
        """Open an episode in the same way as for the policy."""
        program = self._program("environment:Repository", self._closed)
        async with _opened(program, reward) as hosted:
            yield hosted

    @asynccontextmanager
    async def workshop(
        self, draft: Mapping[str, Any], *, sets_up: bool = False
    ) -> AsyncGenerator[Hosted]:
        """Open a workshop, the environment in which set-ups and tests run. If `sets_up` is set, it
        has network access and may write to the prefix."""
        wrap, readable = self._closed, tuple[Path, ...]()
        prefix: Path | None = None
        if sets_up:
            prefix = Path(self.folder, "prefixes", draft["prefix"])
            prefix.mkdir(exist_ok=True)
            prefix.chmod(0o777)
            wrap = self._wrap("host", writable=(prefix,), files_mib=_SETUP_FILES_MIB, processes=512)
            readable = tuple(map(Path, self._config.setup_readable))
        program = self._program("workshop:RepositoryWorkshop", wrap, readable)
        reward = self.sealed(f"draft-{secrets.token_hex(8)}", draft)
        path = self.folder / "sealed" / reward["instance"]
        try:
            async with _opened(program, reward) as hosted:
                yield hosted
        finally:
            path.unlink(missing_ok=True)
            if prefix is not None:
                prefix.chmod(0o755)

    def sealed(self, name: str, instance: Mapping[str, Any]) -> dict[str, Any]:
        """Write an encrypted instance to the folder. Returns the reward spec with the key that
        opens it."""
        key = secrets.token_bytes(32)
        write(self.folder / "sealed" / name, seal(dict(instance), key))
        return {"kind": ENVIRONMENT, "instance": name, "key": key.hex()}

    def _program(
        self, target: str, wrap: EnvironmentSandbox, readable: Sequence[Path] = ()
    ) -> Program:
        within_s = self._config.tests_s + AROUND_S
        return Program(
            target=f"{_PACKAGE}.{target}",
            python=self.python,
            folder=self.folder,
            arguments={"folder": str(self.folder)},
            readable=readable,
            memory_mib=self._config.memory_mib,
            deadlines=Deadlines(open_s=_OPEN_S, verdict_s=within_s),
            wrap=wrap,
            preload=False,
        )


@asynccontextmanager
async def _opened(program: Program, reward: Mapping[str, Any]) -> AsyncGenerator[Hosted]:
    hosted = Hosted(program)
    task = Prompt(
        prompt_id="task",
        domain="code",
        messages=({"role": "user", "content": "…"},),
        reward=reward,
    )
    try:
        await hosted.open(task, seed=0)
        yield hosted
    except EnvironmentLost as error:
        raise Rejected("sandbox", f"{error.fault}: {error.detail[:300]}") from error
    finally:
        await hosted.close()


async def call_workshop(
    hosted: Hosted, name: str, timeout_s: float, **arguments: Any
) -> dict[str, Any]:
    """Call a workshop method and return its JSON result. Raises Rejected if the call fails."""
    call = ToolCall(call_id="1", name=name, arguments=arguments)
    result = await hosted.call(call, timeout_s=timeout_s)
    if result.failed:
        raise Rejected("sandbox", result.text[:300])
    return json.loads(result.text)


def write(path: Path, data: bytes) -> None:
    """Write a file atomically and make it readable by everyone."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(data)
    new.chmod(0o644)
    new.replace(path)
