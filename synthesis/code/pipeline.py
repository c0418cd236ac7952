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
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from keel.agents.env_process.client import ProcessEnvironment
from keel.agents.environments.code.languages import REPO, matches_pattern
from keel.agents.types import EnvironmentLost
from keel.configs.schema import ConfigError
from keel.configs.synthesis import CodeTasksConfig
from keel.rl.turns import ToolCall
from keel.synthesis.author import Author
from keel.synthesis.code.candidate import Candidate, GitSource, PairSource, is_text
from keel.synthesis.code.sandboxes import (
    AROUND_S,
    CodeSandboxes,
    Prefix,
    PrefixBuilder,
    call_workshop,
    instance_of,
    write_atomically,
)
from keel.synthesis.ledger import Rejected

_LEAST_S, _SLOWER = 30.0, 10.0
"""The test timeout in an episode is `_LEAST_S` seconds plus `_SLOWER` times the time that the tests
took during synthesis."""
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
    """Creates coding tasks."""

    def __init__(self, config: CodeTasksConfig, author: Author, folder: Path) -> None:
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
        self._sandboxes = await asyncio.to_thread(CodeSandboxes, self._config, self._folder)
        self._prefixes = PrefixBuilder(self._config, self._author, self._folder, self._sandboxes)
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def make(self, key: str) -> None:
        config = self._config
        candidate = await asyncio.to_thread(self._of[key].load, key)
        await asyncio.to_thread(_check_change, candidate, config)
        built = await self._prefixes.get_or_build(candidate)
        prefix = self._sandboxes.folder / "prefixes" / built.name
        await asyncio.to_thread(_check_leaks, candidate, built, prefix, config.most_revealed)
        instance = instance_of(candidate, built, config.tests_s)
        async with self._sandboxes.workshop(instance, candidate) as environment:
            groups, runs = await self._measured(environment)
        marks = await _judge(candidate, self._author, config.least_judged) if config.judge else {}
        outcomes = {
            "f2p": groups["f2p"],
            "p2p": groups["p2p"],
            "canary": all(run["canary"] == "as wanted" for run in runs),
        }
        instance |= outcomes
        if not all(run["inside"] for run in runs):  # a fixture of the file interferes
            instance["canary_at"] = []
        # Code that never ends should score 0 soon.
        seconds = max(run["seconds"] for run in runs)
        instance["tests_s"] = min(config.tests_s, _LEAST_S + _SLOWER * seconds)
        reward = self._sandboxes.sealed(key, instance)
        try:
            await self._check_gold_patch(candidate, reward)
        except BaseException:
            (self._sandboxes.folder / "sealed" / key).unlink(missing_ok=True)
            raise
        source = candidate.source
        kept = {
            "key": key,
            "project": source.name,
            "language": source.language,
            "origin": dict(candidate.origin),
            "prompt": PROMPT.format(name=source.name, repo=REPO, issue=candidate.issue),
            "gold_patch": candidate.patch(candidate.gold),
            "test_patch": candidate.patch(candidate.harness),
            "setup": built.setup,
            "test": built.test,
            "prefix": built.name,
            **outcomes,
            "flaky": groups["flaky"],
            "marks": marks,
            "reward": reward,
        }
        text = json.dumps(kept, indent=1, ensure_ascii=False)
        write_atomically(self._instances / f"{key}.json", text.encode())
        self._lines[key] = _line_of(kept)
        self._write_lines()

    async def _measured(
        self, environment: ProcessEnvironment
    ) -> tuple[dict[str, list[str]], list[_Results]]:
        """Run the tests several times, without and with the gold patch. Returns the tests grouped
        by outcome, and the results of all runs."""
        within_s = self._config.tests_s + AROUND_S
        if where := (await call_workshop(environment, "copies", AROUND_S))["where"]:
            raise Rejected("future", str(where))
        before, after = list[_Results](), list[_Results]()
        groups: dict[str, list[str]] = {}
        for _ in range(self._config.runs):
            before.append(await call_workshop(environment, "tests", within_s, gold=False))
            after.append(await call_workshop(environment, "tests", within_s, gold=True))
            groups = _group_tests(before, after)
            if not groups["f2p"]:
                raise Rejected("F2P", "no test that fails before passes after")
        if broken := groups["p2f"]:
            raise Rejected("P2F", f"{len(broken)} tests pass before and not after")
        return groups, [*before, *after]

    async def _check_gold_patch(self, candidate: Candidate, reward: Mapping[str, Any]) -> None:
        """Check that the gold patch scores 1 when applied with the policy's own tools."""
        async with self._sandboxes.episode(reward) as environment:
            for call in _calls_of(candidate):
                reply = await environment.call(call, timeout_s=AROUND_S)
                if reply.failed or "[exit status" in reply.text[-40:]:
                    reason = f"the gold patch cannot be applied: {reply.text[:200]}"
                    raise Rejected("verdict", reason)
            try:
                judged = await environment.verdict((), "stop")
            except EnvironmentLost as error:
                raise Rejected("verdict", str(error)[:300]) from error
        if isinstance(judged, str):
            raise Rejected("verdict", judged[:300])
        if judged.parts["correct"] != 1.0:
            raise Rejected("verdict", f"the gold patch scores 0: {dict(judged.facts)}")

    def _write_lines(self) -> None:
        lines = "".join(f"{self._lines[key]}\n" for key in sorted(self._lines))
        if lines:
            write_atomically(self._folder / _TASKS, lines.encode())


def _calls_of(candidate: Candidate) -> Iterator[ToolCall]:
    def call(name: str, **arguments: str) -> ToolCall:
        return ToolCall(call_id="1", name=name, arguments=arguments)

    for path, entry in candidate.gold.items():
        if path in candidate.base:
            yield call("bash", command=f"rm -rf -- {shlex.quote(path)}")
        if entry is not None:
            yield call("edit", path=path, old="", new=entry[1].decode())
            if entry[0] == "x":
                yield call("bash", command=f"chmod +x -- {shlex.quote(path)}")


def _line_of(instance: Mapping[str, Any]) -> str:
    fields = {"id": instance["key"], **{name: instance[name] for name in ("prompt", "reward")}}
    return json.dumps(fields, ensure_ascii=False)


_Results = Mapping[str, Any]
"""The results of one test run, as in `keel.agents.environments.code.environment`."""


def _group_tests(before: Sequence[_Results], after: Sequence[_Results]) -> dict[str, list[str]]:
    """Group tests by their outcome before and after the change, such as fail-to-pass (`f2p`). A
    test missing from a run counts as failed."""
    groups: dict[str, list[str]] = {"f2p": [], "p2p": [], "p2f": [], "flaky": []}
    for name in sorted({name for run in (*before, *after) for name in run["tests"]}):
        first = {run["tests"].get(name) == "passed" for run in before}
        then = {run["tests"].get(name) == "passed" for run in after}
        if len(first) > 1 or len(then) > 1:
            groups["flaky"].append(name)
        elif first == {True}:
            groups["p2p" if then == {True} else "p2f"].append(name)
        elif then == {True}:
            groups["f2p"].append(name)
    return groups


_MIN_LINE = 12
_MIN_COPIED = 3
_MAX_FILE = 8 << 20
_PATCH = re.compile(r"^(diff --git |@@ -\d+,?\d* \+\d+|--- a/|\+\+\+ b/)", re.MULTILINE)
_LINK = re.compile(r"https?://\S*/(?:commit|pull|compare|merge_requests)/\S*")
_TRIES = 2
_MAX_PATCH = 20_000
_QUESTION = """\
A programmer gets a repository and the issue below, and changes the code. Hidden tests then \
decide. Judge whether that is a fair task, from 1 (not at all) to 5 (entirely):

- clear: does the issue describe the problem or the request, so that the goal is known?
- solvable: do the issue and the repository determine everything that the tests check (names, \
messages, formats), so that a right solution passes them?

Give your reasons in a few words, then end with a line of JSON: {{"clear": 3, "solvable": 3}}

# Issue

{issue}

# The change that was made (the programmer does not see it)

{gold}

# The tests that decide (the programmer does not see them)

{tests}
"""


def _check_change(candidate: Candidate, limits: CodeTasksConfig) -> None:
    language, gold, issue = candidate.language, candidate.gold, candidate.issue
    trees = (candidate.base, candidate.after)
    sources = [path for path in gold if path.endswith(language.suffixes)]
    added, removed = _added_and_removed(candidate.patch(sources))
    tested = any(candidate.after.get(path) for path in candidate.test_files())
    new_sources = any(path not in candidate.base for path in sources)
    build_files = any(matches_pattern(path, language.steers) for path in candidate.harness)
    mib = sum(len(entry[1]) for tree in trees for entry in tree.values()) / 2**20
    changed = (*gold, *candidate.harness)
    text = all(is_text(tree.get(path)) for path in changed for tree in trees)
    lines, names = len(added) + len(removed), language.build_names_sources
    least, most = limits.least_issue, limits.most_issue
    telling = [line for one in added if len(line := one.strip()) >= _MIN_LINE]
    revealed = sum(line in issue for line in telling) / (len(telling) or 1)
    for gate, passes, reason in (
        ("no tests", tested, "the change adds or changes no test"),
        ("tests only", sources, f"the change touches no {candidate.source.language} source"),
        ("tree", mib <= 2 * limits.most_tree_mib, f"larger than {limits.most_tree_mib} MiB"),
        ("binary", text, "the change touches a binary file"),
        ("files", len(gold) <= limits.most_files, f"more than {limits.most_files} files change"),
        ("lines", 0 < lines <= limits.most_lines, f"not 1 to {limits.most_lines} lines change"),
        ("build", not (names and new_sources and build_files), "a build file names a new source"),
        ("issue", least <= len(issue) <= most, f"it has not {least:,} to {most:,} characters"),
        ("reveals", not _PATCH.search(issue), "the issue contains a patch"),
        ("reveals", not _LINK.search(issue), "the issue links to a change"),
        ("reveals", revealed <= limits.most_revealed, "the issue contains the change's lines"),
    ):
        if not passes:
            raise Rejected(gate, reason)


def _added_and_removed(patch: str) -> tuple[list[str], list[str]]:
    lines = patch.splitlines()
    return (
        [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++ ")],
        [line[1:] for line in lines if line.startswith("-") and not line.startswith("--- ")],
    )


def _check_leaks(candidate: Candidate, built: Prefix, prefix: Path, most: float) -> None:
    """Check that neither the installed packages nor the files left behind by the setup script
    contain the change. They might contain it, because a prefix built from one commit is reused for
    earlier commits with the same manifests. Raises Rejected if a file contains more than the
    fraction `most` of the changed lines."""
    added, _ = _added_and_removed(candidate.patch(candidate.gold))
    every = {line.strip().encode() for line in added if len(line.strip()) >= _MIN_LINE}
    before = [entry[1] for entry in candidate.base.values()]
    lines = [line for line in sorted(every) if not any(line in data for data in before)]

    def is_copy(data: bytes) -> bool:
        count = sum(line in data for line in lines)
        return count >= _MIN_COPIED and count > most * len(lines)

    if len(lines) < _MIN_COPIED:
        return
    for name, (kind, data) in built.generated.items():
        if kind != "l" and is_copy(data):
            raise Rejected("future", f"the set-up left {name} in the repository with the change")
    for path in prefix.rglob("*"):
        small = not path.is_symlink() and path.is_file() and path.stat().st_size <= _MAX_FILE
        if small and is_copy(path.read_bytes()):
            name = path.relative_to(prefix)
            raise Rejected("future", f"the installed file {name} has the change")


async def _judge(candidate: Candidate, author: Author, least: int) -> dict[str, int]:
    text = _QUESTION.format(
        issue=candidate.issue,
        gold=candidate.patch(candidate.gold)[:_MAX_PATCH],
        tests=candidate.patch(candidate.harness)[:_MAX_PATCH],
    )
    for _ in range(_TRIES):
        reply = await author.ask([{"role": "user", "content": text}], purpose="judge")
        marks = _marks_of(reply.content)
        for name, mark in marks.items():
            if mark < least:
                raise Rejected("judge", f"{name}: {mark} of 5")
        if marks:
            return marks
    raise Rejected("judge", "the judge gave no marks")


def _marks_of(text: str) -> dict[str, int]:
    objects: Sequence[str] = re.findall(r"\{[^{}]*\}", text)
    for value in reversed(objects):
        try:
            parsed = json.loads(value)
            marks = {name: parsed[name] for name in ("clear", "solvable")}
        except (ValueError, KeyError, TypeError):
            continue
        if all(type(mark) is int and 1 <= mark <= 5 for mark in marks.values()):
            return marks
    return {}
