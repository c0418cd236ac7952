"""`family: code` of `keel synthesize`: create tasks from code changes that come with tests.

A change is accepted if its gold patch makes failing tests pass (F2P > 0) and breaks none (P2F = 0).
See DeepSeek-V3.2 (2025), section 3.2.3. The folder contains

    tasks.jsonl    one line per task for `data.sources[].path`, with the keys of the sealed files
    instances/     human-readable tasks with gold and test patches
    prefixes/      the setup of each prefix
    environment/   files that an episode reads: sealed files and installed packages
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from keel.agents.env_process.client import Hosted
from keel.agents.environments.code.languages import REPO
from keel.agents.types import Transcript, Unscored
from keel.configs.schema import ConfigError
from keel.configs.synthesis import CodeTasksConfig
from keel.rl.turns import ToolCall
from keel.synthesis.author import Author
from keel.synthesis.code.candidate import Candidate, GitSource, PairSource
from keel.synthesis.code.filters import check_change, check_leaks, judge
from keel.synthesis.code.sandboxes import (
    AROUND_S,
    CodeSandboxes,
    call_workshop,
    instance_of,
    with_gold,
    write,
)
from keel.synthesis.code.setup import PrefixBuilder
from keel.synthesis.ledger import Rejected

_LEAST_S, _SLOWER = 30.0, 10.0
"""The test timeout in an episode is `_LEAST_S` seconds plus `_SLOWER` times the time that the tests
took here."""
_TASKS = "tasks.jsonl"
PROMPT = """\
The repository of {name} lies in {repo}. Resolve this issue:

<issue>
{issue}
</issue>

Change the code; tests that you cannot see decide whether the issue is resolved. They are put into \
the repository then, and so are the files that decide how they run: what you change in those does \
not count. There is no network."""


class CodePipeline:
    """Creates code tasks. Implements `keel.commands.synthesize.Pipeline`."""

    def __init__(self, config: CodeTasksConfig, author: Author, folder: Path) -> None:
        """Prepare the pipeline. Raises ConfigError if a source or the sandbox cannot be used."""
        if not config.sources:
            raise ConfigError("code.sources: name at least one project")
        self._config, self._author, self._folder = config, author, folder
        self._of: dict[str, GitSource] = {}
        for settings in config.sources:
            source = (PairSource if settings.pairs else GitSource)(settings)
            self._of.update(dict.fromkeys(source.keys, source))
        self.keys: Sequence[str] = list(self._of)
        self._lines: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        self._instances = self._folder / "instances"
        self._instances.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._instances.glob("*.json")):
            instance: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            self._lines[instance["key"]] = _line_of(instance)
        self._write_lines()
        self._rooms = await asyncio.to_thread(CodeSandboxes, self._config, self._folder)
        self._prefixes = PrefixBuilder(self._config, self._author, self._folder, self._rooms)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._write_lines()

    async def make(self, key: str) -> None:
        config = self._config
        candidate = await asyncio.to_thread(self._of[key].load, key)
        await asyncio.to_thread(check_change, candidate, config)
        built = await self._prefixes.of(candidate)
        prefix = self._rooms.folder / "prefixes" / built.name
        await asyncio.to_thread(check_leaks, candidate, built, prefix, config.most_revealed)
        instance = instance_of(candidate, built, config.tests_s)
        async with self._rooms.workshop(with_gold(instance, candidate)) as hosted:
            outcomes = await self._measured(hosted)
        marks = await judge(candidate, self._author, config.least_judged) if config.judge else {}
        instance |= {"f2p": outcomes.f2p, "p2p": outcomes.p2p, "canary": outcomes.canary}
        if not outcomes.inside:  # a fixture of the file interferes
            instance["canary_at"] = []
        # Code that never ends should score 0 soon.
        instance["tests_s"] = min(config.tests_s, _LEAST_S + _SLOWER * outcomes.seconds)
        reward = self._rooms.sealed(key, instance)
        try:
            await self._proved(candidate, reward)
        except BaseException:
            (self._rooms.folder / "sealed" / key).unlink(missing_ok=True)
            raise
        source = candidate.source
        kept = {
            "key": key,
            "project": source.name,
            "language": source.language,
            "origin": dict(candidate.origin),
            "prompt": PROMPT.format(name=source.name, repo=REPO, issue=candidate.issue),
            "gold_patch": candidate.patch(list(candidate.gold)),
            "test_patch": candidate.patch(list(candidate.harness)),
            "setup": built.setup,
            "test": built.test,
            "prefix": built.name,
            "f2p": outcomes.f2p,
            "p2p": outcomes.p2p,
            "flaky": outcomes.flaky,
            "canary": outcomes.canary,
            "marks": marks,
            "reward": reward,
        }
        text = json.dumps(kept, indent=1, ensure_ascii=False)
        write(self._instances / f"{key}.json", text.encode())
        self._lines[key] = _line_of(kept)
        with (self._folder / _TASKS).open("a", encoding="utf-8") as file:
            file.write(f"{self._lines[key]}\n")

    async def _measured(self, hosted: Hosted) -> TestOutcomes:
        within_s = self._config.tests_s + AROUND_S
        if where := (await call_workshop(hosted, "copies", AROUND_S))["where"]:
            raise Rejected("future", str(where))
        before: list[Mapping[str, Any]] = []
        after: list[Mapping[str, Any]] = []
        while True:
            before.append(await call_workshop(hosted, "tests", within_s, gold=False))
            after.append(await call_workshop(hosted, "tests", within_s, gold=True))
            outcomes = outcomes_of(before, after)
            if not outcomes.f2p:
                raise Rejected("F2P", f"no test that fails before passes after {outcomes.about}")
            if len(before) >= self._config.runs:
                break
        if outcomes.p2f:
            raise Rejected("P2F", f"{len(outcomes.p2f)} tests pass before and not after")
        return outcomes

    async def _proved(self, candidate: Candidate, reward: Mapping[str, Any]) -> None:
        """Check that the gold patch scores 1 when it is applied with the policy's own tools."""
        async with self._rooms.episode(reward) as hosted:
            for call in _calls_of(candidate):
                reply = await hosted.call(call, timeout_s=AROUND_S)
                if reply.failed or "[exit status" in reply.text[-40:]:
                    raise Rejected(
                        "verdict", f"the gold patch cannot be applied: {reply.text[:200]}"
                    )
            judged = await hosted.verdict(Transcript(messages=(), finish_reason="stop"))
        if isinstance(judged, Unscored):
            raise Rejected("verdict", judged.reason[:300])
        if judged.parts["correct"] != 1.0:
            raise Rejected("verdict", f"the gold patch scores 0: {dict(judged.facts)}")

    def _write_lines(self) -> None:
        """Write the lines in order. While tasks are being created, new lines are only appended."""
        lines = "".join(f"{self._lines[key]}\n" for key in sorted(self._lines))
        if lines:
            write(self._folder / _TASKS, lines.encode())


def _calls_of(candidate: Candidate) -> list[ToolCall]:
    """Return the tool calls with which a policy would apply the gold patch."""
    calls: list[tuple[str, dict[str, Any]]] = []
    for path, entry in candidate.gold.items():
        if path in candidate.base:
            calls.append(("bash", {"command": f"rm -rf -- {shlex.quote(path)}"}))
        if entry is None:
            continue
        calls.append(("edit", {"path": path, "old": "", "new": entry[1].decode()}))
        if entry[0] == "x":
            calls.append(("bash", {"command": f"chmod +x -- {shlex.quote(path)}"}))
    return [ToolCall(call_id="1", name=name, arguments=value) for name, value in calls]


def _line_of(instance: Mapping[str, Any]) -> str:
    fields = {"id": instance["key"], **{name: instance[name] for name in ("prompt", "reward")}}
    return json.dumps(fields, ensure_ascii=False)


_Results = Mapping[str, Any]
"""The results of one test run, as in `keel.agents.environments.code.grading.Results`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestOutcomes:
    """Test names grouped by outcome before and after the change, such as fail-to-pass (`f2p`). A
    test that is missing from a run counts as failed in that run."""

    f2p: list[str]
    p2p: list[str]
    p2f: list[str]
    flaky: list[str]
    canary: bool
    """True if the canary tests, whose results are known, gave the expected results in every run."""
    inside: bool
    """True if the canary tests inside the hidden test files gave the expected results."""
    seconds: float
    """Duration of the slowest run in seconds."""
    about: str
    """Test counts of the first runs, for messages."""


def outcomes_of(before: Sequence[_Results], after: Sequence[_Results]) -> TestOutcomes:
    runs = (*before, *after)
    names = sorted({name for run in runs for name in run["tests"]})
    found: dict[str, list[str]] = {"f2p": [], "p2p": [], "p2f": [], "flaky": []}
    for name in names:
        first = {run["tests"].get(name) == "passed" for run in before}
        then = {run["tests"].get(name) == "passed" for run in after}
        if len(first) > 1 or len(then) > 1:
            found["flaky"].append(name)
        elif first == {True}:
            found["p2p" if then == {True} else "p2f"].append(name)
        elif then == {True}:
            found["f2p"].append(name)
    return TestOutcomes(
        **found,
        canary=all(run["canary"] == "as wanted" for run in runs),
        inside=all(run["inside"] for run in runs),
        seconds=max(run["seconds"] for run in runs),
        about=f"({_counted(before[0])} and {_counted(after[0])})",
    )


def _counted(run: _Results) -> str:
    counts = Counter[str](run["tests"].values())
    return ", ".join(f"{count} {result}" for result, count in sorted(counts.items())) or "none ran"
