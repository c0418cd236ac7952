"""Runs task candidates, stored as encrypted instance files, in sandboxes with their prefixes.

A prefix holds a project's dependencies, installed once for all candidates with the same manifests.
The default set-up of the language is tried first. If no test passes with it, a set-up agent submits
scripts, using bash in the same sandbox. Each script starts from a clean state.
"""

import asyncio
import hashlib
import json
import os
import secrets
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from keel.agents.env_process.client import ProcessEnvironment
from keel.agents.env_process.launch import EnvironmentProgram
from keel.agents.environments.code.environment import find_packages, normalize_name
from keel.agents.environments.code.languages import matches_pattern
from keel.agents.environments.code.tree import (
    Entry,
    Tree,
    encrypt,
    erase_folder,
    merge_trees,
    tree_as_json,
    tree_from_json,
)
from keel.agents.types import EnvironmentLost, ToolResult
from keel.configs.schema import ConfigError
from keel.configs.synthesis import CodeTasksConfig
from keel.rewards.judge.prompts import object_schema
from keel.rewards.sandbox.bubblewrap import IsolationError
from keel.rewards.sandbox.environments import EnvironmentSandbox, environment_sandbox
from keel.rl.turns import ToolCall, ToolSpec
from keel.rl.types import ENVIRONMENT, Prompt
from keel.synthesis.author import Author, run_tool_loop
from keel.synthesis.code.candidate import Candidate
from keel.synthesis.ledger import Rejected

_OPEN_S = 180.0
AROUND_S = 180.0
"""Seconds added to the test timeout, for work before and after the tests."""
_SETUP_FILES_MIB = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    name: str
    setup: str
    test: str
    generated: Tree = field(default_factory=dict[str, Entry])
    """Files that the set-up created in the repository."""


def instance_of(candidate: Candidate, built: Prefix, tests_s: float) -> dict[str, Any]:
    base = merge_trees(built.generated, candidate.base)
    changed = sorted(path for path in candidate.test_files() if candidate.after.get(path))
    # Patterns for the name of a file, not of its folder.
    patterns = [one for one in candidate.language.tests if not one.endswith("/") and "*" in one]
    at_the_end = candidate.language.canary_at_the_end
    harness, gone = _split_change(candidate.harness)
    return {
        "language": candidate.source.language,
        "project": candidate.project,
        "prefix": built.name,
        "test": built.test,
        "tests_s": tests_s,
        "env": dict(candidate.source.env),
        "base": tree_as_json(base),
        "harness": harness,
        "harness_gone": gone,
        "canary_in": changed[0].rpartition("/")[0] if changed else "",
        "canary_at": [path for path in changed if at_the_end and matches_pattern(path, patterns)],
        "canary": False,
        "f2p": [],
        "p2p": [],
    }


def _split_change(changed: Mapping[str, Entry | None]) -> tuple[dict[str, list[str]], list[str]]:
    tree = {path: entry for path, entry in changed.items() if entry is not None}
    return tree_as_json(tree), [path for path in changed if path not in tree]


class CodeSandboxes:
    """Opens sandboxes for a folder of tasks. Sandboxes for setup scripts have network access, but
    those for episodes don't."""

    def __init__(self, config: CodeTasksConfig, folder: Path) -> None:
        """Create sandboxes that can only read `folder/environment`. Raises ConfigError if this
        machine cannot run them."""
        self.folder = (folder / "environment").absolute()
        for name in ("sealed", "prefixes", "packages"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._config = config
        self.python = config.python or cast(Any, sys)._base_executable
        self._closed = self._sandbox()

    def _sandbox(
        self, network: Literal["none", "host"] = "none", **more: Any
    ) -> EnvironmentSandbox:
        try:
            sandbox = environment_sandbox(
                "bubblewrap", memory_mib=self._config.memory_mib, network=network, knob="", **more
            )
        except IsolationError as error:
            raise ConfigError(f"family = code needs a sandbox: {error}") from error
        assert sandbox is not None
        return sandbox

    def episode(self, reward: Mapping[str, Any]) -> AbstractAsyncContextManager[ProcessEnvironment]:
        return self._opened("Repository", reward, self._closed)

    @asynccontextmanager
    async def workshop(
        self, instance: Mapping[str, Any], candidate: Candidate, *, sets_up: bool = False
    ) -> AsyncGenerator[ProcessEnvironment]:
        """Open an environment that runs setup scripts and tests with the candidate's gold patch. If
        `sets_up` is set, it has network access and can write to the prefix."""
        sandbox, readable = self._closed, tuple[Path, ...]()
        prefix: Path | None = None
        if sets_up:
            prefix = Path(self.folder, "prefixes", instance["prefix"])
            prefix.mkdir(exist_ok=True)
            prefix.chmod(0o777)
            sandbox = self._sandbox(
                "host", writable=(prefix,), files_mib=_SETUP_FILES_MIB, processes=512
            )
            readable = tuple(map(Path, self._config.setup_readable))
        gold, gone = _split_change(candidate.gold)
        draft = {**instance, "gold": gold, "gold_gone": gone}
        reward = self.sealed(f"draft-{secrets.token_hex(8)}", draft)
        path = self.folder / "sealed" / reward["instance"]
        try:
            async with self._opened("RepositoryWorkshop", reward, sandbox, readable) as environment:
                yield environment
        finally:
            path.unlink(missing_ok=True)
            if prefix is not None:
                prefix.chmod(0o755)

    def sealed(self, name: str, instance: Mapping[str, Any]) -> dict[str, Any]:
        key = secrets.token_bytes(32)
        write_atomically(self.folder / "sealed" / name, encrypt(dict(instance), key))
        return {"kind": ENVIRONMENT, "instance": name, "key": key.hex()}

    @asynccontextmanager
    async def _opened(
        self,
        target: str,
        reward: Mapping[str, Any],
        sandbox: EnvironmentSandbox,
        readable: Sequence[Path] = (),
    ) -> AsyncGenerator[ProcessEnvironment]:
        program = EnvironmentProgram(
            target=f"keel.agents.environments.code.environment:{target}",
            python=self.python,
            folder=self.folder,
            arguments={"folder": str(self.folder)},
            readable=readable,
            memory_mib=self._config.memory_mib,
            open_s=_OPEN_S,
            verdict_s=self._config.tests_s + AROUND_S,
            sandbox=sandbox,
            preload=False,
        )
        environment = ProcessEnvironment(program)
        messages = ({"role": "user", "content": "…"},)
        task = Prompt(prompt_id="task", domain="code", messages=messages, reward=reward)
        try:
            await environment.open(task, seed=0)
            yield environment
        except EnvironmentLost as error:
            raise Rejected("sandbox", error.detail[:300]) from error
        finally:
            await environment.close()


async def call_workshop(
    environment: ProcessEnvironment, name: str, timeout_s: float, **arguments: Any
) -> dict[str, Any]:
    call = ToolCall(call_id="1", name=name, arguments=arguments)
    result = await environment.call(call, timeout_s=timeout_s)
    if result.failed:
        raise Rejected("sandbox", result.text[:300])
    return json.loads(result.text)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically and make it readable by all users."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(data)
    new.chmod(0o644)
    new.replace(path)


_BASH_S = 600.0
_MAX_OUTPUT = 1500
_MAX_REASON = 300
_TOOLS = (
    ToolSpec(
        name="bash",
        description="Run a command in bash, in the repository, with network access.",
        parameters=object_schema(command={"type": "string"}),
    ),
    ToolSpec(
        name="submit",
        description="Submit the set-up and the test command. Both run from scratch.",
        parameters=object_schema(
            setup={"type": "string", "description": "a bash script"},
            test={"type": "string", "description": "a bash command"},
        ),
    ),
)
_TASK = """\
Find out how to set up the project in {repo} and how to run its tests, then call `submit`.

Both scripts run in bash in the repository, without root. `setup` has network access and must \
install everything into the folder $PREFIX, which is empty at first; only this folder and the \
repository are kept. $VERSION is the project's version, for build tools that look for it in git. \
`test` has no network access. It runs all tests and writes their results in JUnit's XML format \
into the folder $JUNIT, in any number of .xml files. The tests must use the project from the \
repository instead of a copy of it: install it in editable mode, for example.

The language is {language}. This set-up was tried:

```
{setup}
```

with this test command:

```
{test}
```

The result: {why}
"""


class PrefixBuilder:
    def __init__(
        self, config: CodeTasksConfig, author: Author, folder: Path, sandboxes: CodeSandboxes
    ) -> None:
        self._config, self._author, self._sandboxes = config, author, sandboxes
        self._records = folder / "prefixes"
        self._records.mkdir(exist_ok=True)
        self._locks: dict[str, asyncio.Lock] = {}
        self._refused: dict[str, tuple[str, str]] = {}
        self._projects = {normalize_name(source.name) for source in config.sources}

    async def get_or_build(self, candidate: Candidate) -> Prefix:
        """Return the install prefix that holds a candidate's dependencies, building it if
        necessary. Raises Rejected if none of its tests pass."""
        name = self._name(candidate)
        async with self._locks.setdefault(name, asyncio.Lock()):
            record = self._records / f"{name}.json"
            if record.is_file():
                fields: dict[str, Any] = json.loads(record.read_text("utf-8"))
                fields["generated"] = tree_from_json(fields["generated"])
                return Prefix(**fields)
            if name in self._refused:
                raise Rejected(*self._refused[name])
            try:
                built = await self._build(candidate, name)
                await self._list(name, candidate)
            except BaseException as error:  # including AuthorLost and BudgetSpent
                if isinstance(error, Rejected):
                    self._refused[name] = (error.gate, error.reason)
                # Episodes could read it, and no list names its packages.
                await asyncio.to_thread(
                    erase_folder, str(self._sandboxes.folder / "prefixes" / name)
                )
                (self._sandboxes.folder / "packages" / f"{name}.json").unlink(missing_ok=True)
                raise
            fields = {"name": name, "setup": built.setup, "test": built.test}
            text = json.dumps({**fields, "generated": tree_as_json(built.generated)})
            write_atomically(record, text.encode())
            return built

    async def _list(self, name: str, candidate: Candidate) -> None:
        folder = self._sandboxes.folder
        packages = await asyncio.to_thread(find_packages, [str(folder / "prefixes" / name)])
        for other in sorted(self._projects - {normalize_name(one) for one in candidate.project}):
            if other in packages:
                raise Rejected("future", f"a copy of the project {other} is installed")
        write_atomically(folder / "packages" / f"{name}.json", json.dumps(packages).encode())

    def _name(self, candidate: Candidate) -> str:
        language, source = candidate.language, candidate.source
        manifests = {
            path: hashlib.sha256(entry[1]).hexdigest()
            for path, entry in sorted(candidate.base.items())
            if matches_pattern(path, language.manifests)
        }
        scripts = [source.setup or language.setup, source.test or language.test]
        text = json.dumps([source.name, source.language, scripts, manifests, dict(source.env)])
        return f"{source.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    async def _build(self, candidate: Candidate, name: str) -> Prefix:
        language, source = candidate.language, candidate.source
        first = Prefix(
            name=name, setup=source.setup or language.setup, test=source.test or language.test
        )
        draft = instance_of(candidate, first, self._config.tests_s)
        env = {name: os.environ[name] for name in self._config.setup_env if name in os.environ}
        draft["env"] = {**env, "VERSION": candidate.version, **draft["env"]}
        async with self._sandboxes.workshop(draft, candidate, sets_up=True) as environment:
            built, why = await self._try_setup(environment, candidate, first)
            if built is not None:
                return built
            if self._config.setup_turns:
                built = await self._agent(environment, candidate, first, why)
                if built is not None:
                    return built
                why = f"the set-up agent failed too; at first, {why}"
        raise Rejected("setup", " ".join(why.split())[-_MAX_REASON:])

    async def _try_setup(
        self, environment: ProcessEnvironment, candidate: Candidate, expected: Prefix
    ) -> tuple[Prefix | None, str]:
        """Run the setup script of `expected` in the sandbox of `environment`, then run the tests
        exactly as episodes will. Returns the finished prefix, or None along with the reason for the
        failure."""
        within_s = self._config.setup_s
        result = await call_workshop(
            environment, "set_up", within_s + AROUND_S, script=expected.setup, within_s=within_s
        )
        if result["status"] != 0:
            how = "timed out" if result["status"] is None else "failed"
            return None, f"the set-up {how}: {result['output'][-_MAX_OUTPUT:].strip()}"
        built = replace(expected, generated=tree_from_json(result["generated"]))
        draft = instance_of(candidate, built, self._config.tests_s)
        async with self._sandboxes.workshop(draft, candidate) as workshop:
            ran = await call_workshop(
                workshop, "tests", self._config.tests_s + AROUND_S, gold=False
            )
        if "passed" in ran["tests"].values():
            return built, ""
        reply = ran["output"][-_MAX_OUTPUT:].strip()
        return None, f"none of {len(ran['tests'])} tests passes: {reply}"

    async def _agent(
        self, environment: ProcessEnvironment, candidate: Candidate, first: Prefix, why: str
    ) -> Prefix | None:
        prefix: Prefix | None = None

        async def call(one: ToolCall) -> ToolResult:
            nonlocal prefix
            value: Mapping[str, Any] = one.arguments
            if one.name == "bash":
                bash = {"command": value["command"], "timeout_s": int(_BASH_S)}
                return await environment.call(
                    ToolCall(call_id=one.call_id, name="bash", arguments=bash),
                    timeout_s=_BASH_S + AROUND_S,
                )
            expected = Prefix(name=first.name, setup=value["setup"], test=value["test"])
            prefix, complaint = await self._try_setup(environment, candidate, expected)
            return ToolResult(text=complaint or "It works.", done=prefix is not None)

        text = _TASK.format(
            repo="/tmp/repo",
            language=candidate.source.language,
            setup=first.setup.strip(),
            test=first.test,
            why=why,
        )
        await run_tool_loop(
            self._author,
            [{"role": "user", "content": text}],
            tools=_TOOLS,
            call=call,
            most_turns=self._config.setup_turns,
            purpose="setup",
        )
        return prefix
