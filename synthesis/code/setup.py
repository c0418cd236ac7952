"""Prefixes: what a project's tests need, installed once for all candidates that need the same.

The language's own set-up is tried first; where no test passes then, a set-up agent looks into it: a
model with bash in the same sandbox, which hands in a script that is run from the beginning.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.agents.env_process.client import Hosted
from keel.agents.environments.code.copies import find_packages, normalize_name
from keel.agents.environments.code.languages import matches
from keel.agents.environments.code.tree import erase, tree_as_json, tree_from_json
from keel.agents.types import ToolResult
from keel.configs.synthesis import CodeTasksConfig
from keel.rl.turns import ToolCall, ToolSpec
from keel.synthesis.author import Author
from keel.synthesis.code.candidate import Candidate
from keel.synthesis.code.draft import AROUND_S, Built, Rooms, asked, instance_of, with_gold, write
from keel.synthesis.ledger import Refused
from keel.synthesis.work import work

BASH_S = 600.0
MOST_SAID = 1500
MOST_REASON = 300
TOOLS = (
    ToolSpec(
        name="bash",
        description="Run a command in bash, in the repository. There is a network.",
        parameters={
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
            "additionalProperties": False,
        },
    ),
    ToolSpec(
        name="submit",
        description="Hand in how it is set up and tested. Both are run from the beginning.",
        parameters={
            "type": "object",
            "properties": {
                "setup": {"type": "string", "description": "a bash script"},
                "test": {"type": "string", "description": "a bash command"},
            },
            "required": ["setup", "test"],
            "additionalProperties": False,
        },
    ),
)
TASK = """\
Find out how the project in {repo} is set up and how its tests are run, then call `submit`.

Both run in bash in the repository, without root. `setup` has the network, and must install \
everything into the folder $PREFIX (which is empty before it, and the only folder besides the \
repository that is kept); $VERSION is the project's version, for build tools that look for it in \
git. `test` has no network, runs all tests and writes their results in JUnit's XML format into \
the folder $JUNIT, any number of .xml files. The project itself must be used from the repository, \
not from a copy of it: install it in editable mode, for example.

The language is {language}. This was tried:

```
{setup}
```

and then

```
{test}
```

What came of it: {why}
"""


class Prefixes:
    """Built on demand, kept in the folder."""

    def __init__(self, config: CodeTasksConfig, author: Author, folder: Path, rooms: Rooms) -> None:
        self._config, self._author, self._rooms = config, author, rooms
        self._records = folder / "prefixes"
        self._records.mkdir(exist_ok=True)
        self._locks: dict[str, asyncio.Lock] = {}
        self._refused: dict[str, tuple[str, str]] = {}
        self._projects = {normalize_name(source.name) for source in config.sources}

    async def of(self, candidate: Candidate) -> Built:
        """Raises Refused where no test can be made to pass."""
        name = self._name(candidate)
        async with self._locks.setdefault(name, asyncio.Lock()):
            record = self._records / f"{name}.json"
            if record.is_file():
                found: dict[str, Any] = json.loads(record.read_text())
                found["generated"] = tree_from_json(found["generated"])
                return Built(**found)
            if name in self._refused:
                raise Refused(*self._refused[name])
            try:
                built = await self._build(candidate, name)
                await self._list(name, candidate)
            except BaseException as error:  # the author may be lost, or the budget spent
                if isinstance(error, Refused):
                    self._refused[name] = (error.gate, error.reason)
                # Episodes could read it, and it stands on no list.
                await asyncio.to_thread(self._remove, name)
                raise
            fields = {"name": name, "setup": built.setup, "test": built.test}
            text = json.dumps({**fields, "generated": tree_as_json(built.generated)})
            write(record, text.encode())
            return built

    def _remove(self, name: str) -> None:
        erase(str(self._rooms.folder / "prefixes" / name))
        (self._rooms.folder / "packages" / f"{name}.json").unlink(missing_ok=True)

    async def _list(self, name: str, candidate: Candidate) -> None:
        """Keeps which packages are there, for episodes to look whether theirs is among them."""
        folder = self._rooms.folder
        found = await asyncio.to_thread(find_packages, [str(folder / "prefixes" / name)])
        for other in sorted(self._projects - {normalize_name(one) for one in candidate.project}):
            if other in found:
                raise Refused("future", f"what is installed has a copy of {other}, a project too")
        write(folder / "packages" / f"{name}.json", json.dumps(found).encode())

    def _name(self, candidate: Candidate) -> str:
        language, source = candidate.language, candidate.source
        manifests = {
            path: hashlib.sha256(entry[1]).hexdigest()
            for path, entry in sorted(candidate.base.items())
            if matches(path, language.manifests)
        }
        scripts = [source.setup or language.setup, source.test or language.test]
        text = json.dumps([source.name, source.language, scripts, manifests, dict(source.env)])
        return f"{source.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    async def _build(self, candidate: Candidate, name: str) -> Built:
        language, source = candidate.language, candidate.source
        first = Built(
            name=name, setup=source.setup or language.setup, test=source.test or language.test
        )
        async with self._rooms.workshop(self._draft(candidate, first), sets_up=True) as hosted:
            built, why = await self._tried(hosted, candidate, first)
            if built is not None:
                return built
            if self._config.setup_turns:
                built = await self._agent(hosted, candidate, first, why)
                if built is not None:
                    return built
                why = f"the set-up agent found no way; at first, {why}"
        raise Refused("setup", " ".join(why.split())[-MOST_REASON:])

    def _draft(self, candidate: Candidate, built: Built) -> dict[str, Any]:
        instance = with_gold(instance_of(candidate, built, self._config.tests_s), candidate)
        told = {name: os.environ[name] for name in self._config.setup_env if name in os.environ}
        return {**instance, "env": {**told, "VERSION": candidate.version, **instance["env"]}}

    async def _tried(
        self, hosted: Hosted, candidate: Candidate, wanted: Built
    ) -> tuple[Built | None, str]:
        """Set up in `hosted`, and tested as episodes will be; or why not."""
        within_s = self._config.setup_s
        result = await asked(
            hosted, "set_up", within_s + AROUND_S, script=wanted.setup, within_s=within_s
        )
        if result["status"] != 0:
            how = "took too long" if result["status"] is None else "failed"
            return None, f"the set-up {how}: {result['said'][-MOST_SAID:].strip()}"
        built = Built(
            name=wanted.name,
            setup=wanted.setup,
            test=wanted.test,
            generated=tree_from_json(result["generated"]),
        )
        draft = with_gold(instance_of(candidate, built, self._config.tests_s), candidate)
        async with self._rooms.workshop(draft) as room:
            ran = await asked(room, "tests", self._config.tests_s + AROUND_S, gold=False)
        passed = sum(result == "passed" for result in ran["tests"].values())
        if passed:
            return built, ""
        said = ran["said"][-MOST_SAID:].strip()
        return None, f"of {len(ran['tests'])} tests none passes: {said}"

    async def _agent(
        self, hosted: Hosted, candidate: Candidate, first: Built, why: str
    ) -> Built | None:
        found: Built | None = None

        async def call(one: ToolCall) -> ToolResult:
            nonlocal found
            given: Mapping[str, Any] = one.arguments
            if one.name == "bash":
                bash = {"command": given["command"], "timeout_s": int(BASH_S)}
                return await hosted.call(
                    ToolCall(call_id=one.call_id, name="bash", arguments=bash),
                    timeout_s=BASH_S + AROUND_S,
                )
            wanted = Built(name=first.name, setup=given["setup"], test=given["test"])
            found, complaint = await self._tried(hosted, candidate, wanted)
            return ToolResult(text=complaint or "It works.", done=found is not None)

        text = TASK.format(
            repo="/tmp/repo",
            language=candidate.source.language,
            setup=first.setup.strip(),
            test=first.test,
            why=why,
        )
        await work(
            self._author,
            [{"role": "user", "content": text}],
            tools=TOOLS,
            call=call,
            most_turns=self._config.setup_turns,
            purpose="setup",
        )
        return found
