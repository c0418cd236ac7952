"""`family: general` of `keel synthesize`: create environments with tasks for general agents.

tasks/NAME/   finished environments (keel.agents.environments.general.author_code)
making/       unfinished environments, which the next start builds again from scratch
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from keel.agents.environments.general.author_code import MODULES
from keel.agents.environments.search.documents import (
    Library,
    SearchIndex,
    ensure_index,
    excerpt,
    search_terms,
)
from keel.agents.environments.search.environment import load_library
from keel.agents.types import EnvironmentLost, ToolResult, Transcript, Unscored
from keel.configs.schema import ConfigError
from keel.configs.synthesis import GeneralConfig, slug
from keel.rl.turns import Message, ToolCall, ToolSpec, seed_of
from keel.synthesis.author import (
    Author,
    AuthorReply,
    gather_or_cancel,
    object_schema,
    run_tool_loop,
)
from keel.synthesis.general.sandboxes import SLACK_S, GeneralSandboxes, reject_crashes
from keel.synthesis.ledger import Rejected


class GeneralPipeline:
    """Creates tasks for general agents. A task's key consists of a category and a number."""

    def __init__(
        self,
        config: GeneralConfig,
        folder: Path,
        *,
        author: Author,
        reference: Author,
        seed: int,
    ) -> None:
        """Set up the pipeline. `reference` attempts tasks to measure how hard they are. Raises
        ConfigError if a setting is invalid."""
        if not config.categories:
            raise ConfigError("general.categories is empty. Name the topics of the tasks")
        self.keys: Sequence[str] = [
            f"{slug(category)}-{number}"
            for number in range(config.per_category)
            for category in config.categories
        ]
        self._category = {slug(category): category for category in config.categories}
        self._config, self._author, self._seed = config, author, seed
        self._reference = reference
        self._search = _search_of(config)
        self._done = folder.absolute() / "tasks"
        self._sandboxes = GeneralSandboxes(folder.absolute() / "making", config)

    async def __aenter__(self) -> Self:
        self._done.mkdir(parents=True, exist_ok=True)
        await self._sandboxes.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._sandboxes.__aexit__(*error)

    async def make(self, key: str) -> Sequence[Rejected] | None:
        done, path = self._done / key, self._sandboxes.making / key
        if done.exists():  # an earlier start ended before it wrote the ledger
            return None
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        path.chmod(0o755)
        name, _, number = key.rpartition("-")
        making = _EnvironmentWriter(
            sandboxes=self._sandboxes,
            path=path,
            category=self._category[name],
            number=int(number),
            author=self._author,
            reference=self._reference,
            search=self._search,
            seed=seed_of(self._seed, key),
        )
        try:
            await making.run()
            os.replace(path, done)
        except Rejected as refused:
            refused.drafts = making.drafts
            raise
        finally:
            shutil.rmtree(path, ignore_errors=True)
        return making.drafts


_SHOWN = 6000
_HEADING = re.compile(
    r"^#+[ \t]*`?([a-z]+)(?:\.py|\.md)?`?[ \t]*:?[ \t]*$", re.MULTILINE | re.IGNORECASE
)
_BLOCK = re.compile(r"^(`{3,}|~{3,})[^\n]*\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(kw_only=True)
class _EnvironmentWriter:
    """Lets the author model build one environment, in a folder below `sandboxes.making`. Its code
    never runs in this process. `reference` attempts the tasks to measure their difficulty."""

    sandboxes: GeneralSandboxes
    path: Path
    category: str
    number: int
    author: Author
    reference: Author
    search: _Search | None
    seed: int
    drafts: list[Rejected] = field(default_factory=list[Rejected])

    def __post_init__(self) -> None:
        self._files: dict[str, str] = dict.fromkeys(("tools.py", "solve.py", "verify.py"), "")
        self._tasks: list[dict[str, Any]] = []
        self._specs: Mapping[str, Mapping[str, Any]] = {}
        self._answers: list[Any] = []
        self._calls: list[int] = []
        self._passed: list[int] = []
        self._messages: list[Message] = []

    async def run(self) -> None:
        config = self.sandboxes.config
        kind = await self._database()
        (shown,) = await self.sandboxes.workshop(
            "database", self.path, "shown", within_s=config.call_s, most=_SHOWN
        )
        self._messages = _tools_messages(self.category, shown, kind)
        await self._revised("tools", self._first_tools)
        for step in range(config.steps):
            passed = self._passed[-1] if self._passed else None
            if config.attempts and passed == 0:
                break  # a harder task could not be measured
            self._messages.append(_task_message(step, passed, config.attempts))
            try:
                await self._revised("task", self._step)
            except Rejected as refused:
                if step < config.least_tasks:
                    raise
                self.drafts.append(refused)
                break
        if len(self._tasks) < config.least_tasks:
            raise Rejected(
                "harder",
                f"no attempt passes after {len(self._tasks)} tasks, fewer than "
                f"general.least_tasks = {config.least_tasks}",
            )
        self._write(self._files, self._tasks)
        provenance = {
            "made": "by keel synthesize",
            "keel": version("keel-rl"),
            "date": datetime.now(UTC).date().isoformat(),
            "category": self.category,
            "author": self.author.name,
            "reference": self.reference.name,
            "seed": self.seed,
            "attempts": config.attempts,
            "passed": self._passed if config.attempts else None,
            "calls_of_the_solution": self._calls,
            "drafts_refused": [[one.gate, one.reason] for one in self.drafts],
        }
        _put_json(self.path / "provenance.json", provenance)

    async def _database(self) -> str:
        config, kind = self.sandboxes.config, ""

        async def call(call: ToolCall) -> ToolResult:
            nonlocal kind
            if call.name == _SEARCH.name:
                assert self.search is not None
                try:
                    query = str(call.arguments["query"])
                    return ToolResult(text=await asyncio.to_thread(self.search, query))
                except Exception as error:  # a search API raises anything
                    return ToolResult(text=str(error), failed=True)
            result = await hosted.call(call, timeout_s=config.bash_s + SLACK_S)
            if call.name != "submit_database" or result.failed:
                return result
            kind = self._store_database(result.text)
            return ToolResult(text="Submitted.", done=True)

        arguments = {"most_kib": config.database_kib, "bash_s": config.bash_s}
        messages = _database_messages(
            self.category,
            self.number,
            config.per_category,
            config.database_kib,
            search=self.search is not None,
            network=config.network,
        )
        with reject_crashes("database"):
            async with self.sandboxes.open(
                "workshop:DatabaseDesk", arguments=arguments, network=config.network
            ) as opened:
                hosted, opening = opened
                worked = await run_tool_loop(
                    self.author,
                    messages,
                    tools=[*opening.tools, *([_SEARCH] if self.search else [])],
                    call=call,
                    most_turns=config.max_turns,
                    purpose="database",
                )
        if not kind:
            limits = {"turns": "general.max_turns", "length": "author.max_tokens or the context"}
            within = f" within {limits[worked.ended]}" if worked.ended in limits else ""
            raise Rejected("database", f"no database submitted{within}")
        return kind

    def _store_database(self, text: str) -> str:
        try:
            reply = json.loads(text)
            kind, data = reply["name"], base64.b64decode(reply["data"], validate=True)
        except (ValueError, TypeError, LookupError, binascii.Error) as error:
            raise Rejected("database", f"cannot be read: {error}") from error
        if kind not in (".json", ".sqlite") or len(data) > self.sandboxes.config.database_kib << 10:
            raise Rejected("database", "not a database, or too large")
        _put(self.path / f"database{kind}", data)
        return kind

    async def _revised(self, purpose: str, hold: Callable[[AuthorReply], Awaitable[None]]) -> None:
        for remaining in reversed(range(self.sandboxes.config.revisions + 1)):
            reply = await self.author.ask(self._messages, purpose=purpose)
            self._messages.append(reply.message())
            try:
                return await hold(reply)
            except Rejected as error:
                refused = error
            if not remaining:
                raise refused
            self.drafts.append(refused)
            answer = f"Rejected ({refused.gate}): {refused.reason}"
            self._messages.append(_user(f"{answer}\n\nFix it, and write all sections again."))

    async def _first_tools(self, reply: AuthorReply) -> None:
        files = {**self._files, "tools.py": _split_sections(reply, ("tools",))["tools"]}
        self._write(files, [])
        self._specs = await self.sandboxes.describe(self.path)
        self._files = files

    async def _step(self, reply: AuthorReply) -> None:
        number = len(self._tasks)
        sections = _split_sections(
            reply, ("question", "solve", "verify"), ("tools",) if number else ()
        )
        pieces = {
            "tools.py": sections.get("tools", ""),
            "solve.py": _number_function(sections["solve"], "solve", number),
            "verify.py": _number_function(sections["verify"], "verify", number),
        }
        files = {
            name: "\n\n\n".join(filter(None, (self._files[name].rstrip(), piece.rstrip()))) + "\n"
            for name, piece in pieces.items()
        }
        self._write(files, self._tasks)
        again = "tools" in sections
        specs = await self.sandboxes.describe(self.path) if again else self._specs
        answer, calls = await self.sandboxes.check(
            self.path, number, specs, self._answers, again=again, seed=self.seed
        )
        task = {"question": sections["question"].strip(), "tools": list(specs)}
        self._write(files, [*self._tasks, task])
        passed = await self._attempts_passed(number)
        self._files, self._specs = files, specs
        self._tasks.append(task)
        self._answers.append(answer)
        self._calls.append(calls)
        self._passed.append(passed)

    async def _attempts_passed(self, number: int) -> int:
        """Let the reference policy attempt the task, and return how many attempts pass. Raises
        Rejected if as many pass as at the previous task."""

        async def passes() -> bool:
            try:
                async with self.sandboxes.open_episode(self.path, number) as (hosted, opening):
                    worked = await run_tool_loop(
                        self.reference,
                        opening.messages,
                        tools=opening.tools,
                        call=partial(hosted.call, timeout_s=self.sandboxes.config.call_s),
                        most_turns=self.sandboxes.config.max_turns,
                        purpose="attempt",
                    )
                    transcript = Transcript(messages=worked.messages, finish_reason="stop")
                    verdict = await hosted.verdict(transcript)
            except EnvironmentLost as error:
                if error.during == "parent":
                    raise
                return False  # because of its calls
            return not isinstance(verdict, Unscored) and verdict.parts["correct"] == 1.0

        attempts = self.sandboxes.config.attempts
        passed = sum(await gather_or_cancel(*(passes() for _ in range(attempts))))
        if attempts and self._passed and passed >= self._passed[-1]:
            raise Rejected(
                "harder",
                f"{passed} of {attempts} attempts of the reference policy pass, "
                f"{self._passed[-1]} at the task before",
            )
        return passed

    def _write(self, files: dict[str, str], tasks: Sequence[dict[str, Any]]) -> None:
        for name, text in files.items():
            _put(self.path / name, text.encode(errors="replace"))
        about = {"name": self.path.name, "category": self.category, "tasks": list(tasks)}
        _put_json(self.path / "task.json", about)


def _put_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    _put(path, text.encode(errors="replace"))


def _put(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o644)  # as root, Keel runs the sandbox as another user


def _split_sections(
    reply: AuthorReply, required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, str]:
    """Split a response into sections at its headings. A section's content is its first code block,
    or its text if it has none. Raises Rejected if a required section is missing."""
    if reply.cut:
        raise Rejected("form", "the reply was cut off by author.max_tokens or the context")
    # Blank out the code blocks, so that comments in code are not taken for headings.
    text = _BLOCK.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), reply.content)
    heads = [m for m in _HEADING.finditer(text) if m[1].lower() in {*required, *optional}]
    sections: dict[str, str] = {}
    ends = [*(m.start() for m in heads[1:]), len(text)]
    for head, end in zip(heads, ends, strict=False):
        body = reply.content[head.end() : end]
        block = _BLOCK.search(body)
        sections[head[1].lower()] = (block[2] if block else body).strip() + "\n"
    for name in required:
        if not sections.get(name, "").strip():
            raise Rejected("form", f"the reply has no section under a heading `## {name}`")
    return {name: body for name, body in sections.items() if body.strip()}


def _number_function(source: str, name: str, number: int) -> str:
    """Append the task's number to the name of the function `name`. Raises Rejected unless the code
    defines that function exactly once."""
    changed, count = re.subn(
        rf"^def {name}(?=\s*\()", f"def {name}_{number}", source, flags=re.MULTILINE
    )
    if count != 1:
        raise Rejected("form", f"`## {name}` must define one function `def {name}(…)`, has {count}")
    return changed


_Search = Callable[[str], str]
"""Maps a query to text. Raises ValueError with a message for the author if the query is invalid."""
_SEARCH = ToolSpec(
    name="search",
    description="Search for passages of text.",
    parameters=object_schema(query={"type": "string", "description": "A few words"}),
)
_PASSAGE = 1200
_PASSAGES = 5
_MAX_RESULT = 12_000


def _search_of(config: GeneralConfig) -> _Search | None:
    if not (config.documents or config.library):
        return None
    index: Library
    try:
        if config.library:
            index = load_library(config.library, config.options)
        else:
            index = SearchIndex(ensure_index(Path(config.documents).expanduser()))
            if not len(index):
                raise ValueError("the folder has no text")
    except Exception as error:  # a user's function raises anything
        where = "library" if config.library else "documents"
        raise ConfigError(f"general.{where} = {getattr(config, where)}: {error}") from error

    def search(query: str) -> str:
        words = search_terms(query)
        if not words:
            raise ValueError("the query contains no words")
        results: list[dict[str, str]] = []
        for hit in index.search(query, _PASSAGES):
            if document := index.document(hit.name):
                text = excerpt(document.text, words, _PASSAGE)
                results.append({"document": hit.name, "title": hit.title, "text": text})
        return json.dumps(results, ensure_ascii=False)[:_MAX_RESULT]

    return search


_SYSTEM: Message = {
    "role": "system",
    "content": "You build environments for training agents that call tools: a database, tools that "
    "read it, and tasks that are hard to solve and easy to verify.",
}
_TASK = """\
question: the question for the agent, with the exact form of the answer (JSON: which keys, which \
types). It names no tool. The answer follows from the database alone and cannot be guessed.
solve: one function `def solve(tools):` that returns the answer as a JSON value. It may only call \
tools (`tools.name(parameter=…)`, with keyword arguments) and compute: no imports, files, \
database, classes or other functions. It must derive the answer from the results of the tools. A \
tool that fails raises an exception.
verify: one function `def verify(answer, database):` that returns True or False, or a dict with \
one of these for each requirement. It checks the answer against the database and the question, \
without calling solve. It accepts every right answer and rejects everything else: an empty answer, \
one with a changed value, one with a missing or an additional part. It must not raise on answers \
of another form. It may import the same modules as the tools, except random.

Reply with these sections:

## question
```text
…
```
## solve
```python
…
```
## verify
```python
…
```"""


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _database_messages(
    category: str, number: int, count: int, most_kib: int, *, search: bool, network: bool
) -> list[Message]:
    several = f" It is number {number + 1} of {count}; make it different." if count > 1 else ""
    look_up = "Use search to look up facts where real ones help. " if search else ""
    look_up += (
        "Commands can reach the internet, so fetch real data where it helps. "
        if network
        else "Commands have no network. "
    )
    return [
        _SYSTEM,
        _user(
            f"Category: {category}.{several}\n\nBuild a database for this category: several kinds "
            "of entities with numbers, texts and relations that tasks can put constraints on. "
            "There must be enough entities that the answer to a task is not obvious at a glance. "
            f"{look_up}Write the database as one JSON file (an object of lists or objects) or one "
            f"SQLite file of at most {most_kib} KiB, for example by a Python program with a fixed "
            "seed. Inspect it, then submit it with submit_database."
        ),
    ]


def _tools_messages(category: str, data: str, kind: str) -> list[Message]:
    value = "a sqlite3.Connection whose rows are sqlite3.Row"
    if kind == ".json":
        value = "the value of the JSON file"
    return [
        _SYSTEM,
        _user(
            f"Category: {category}. This is the database, or its beginning:\n\n{data}\n\n"
            "Write tools.py. Each public function is a tool that reads the database: small and "
            "general, not one that solves a task. The global variable `database` is "
            f"{value}; do not open it yourself, and print nothing. Every parameter and result "
            "needs a specific type hint (str, int, float, bool, list[…], dict[…], Literal[…]), "
            "and every tool a docstring that describes its result. The same call must return the "
            "same result in every process, so do not use the clock, random numbers or the order "
            "of a set. Report errors as LookupError or ValueError with a helpful message. The "
            "names of helper functions begin with an underscore. You may import only from: "
            f"{', '.join(MODULES[1:])}. Do not use attributes that begin with an underscore, or "
            "str.format.\n\nReply with one section:\n\n## tools\n```python\n…\n```"
        ),
    ]


def _task_message(step: int, passed: int | None, attempts: int) -> Message:
    if not step:
        return _user(f"Now write a simple task that needs a few calls.\n\n{_TASK}")
    measured = (
        f"{passed} of {attempts} attempts at the last task passed; fewer must pass at this one. "
        if attempts
        else ""
    )
    return _user(
        "Now write a harder task over the same database: more constraints that depend on each "
        f"other, more look-ups, conditions, an optimum. {measured}The last task's answer must be "
        "wrong for it. If the tools do not suffice, add new functions under a heading `## tools` "
        f"before the other sections; the existing tools stay.\n\n{_TASK}"
    )
