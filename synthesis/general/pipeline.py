"""`family: general` of `keel synthesize`: create environments with tasks for general agents.

tasks/NAME/   finished environments (keel.agents.environments.general.author_code)
making/       unfinished environments, which the next start builds again from scratch
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from keel.agents.environments.general.author_code import MODULES
from keel.agents.types import EnvironmentLost, ToolResult
from keel.configs.schema import ConfigError
from keel.configs.synthesis import GeneralConfig, slug
from keel.rl.turns import Message, Parsed, ToolCall, message_of, seed_of
from keel.rl.types import Verdict
from keel.synthesis.author import Author, gather_or_cancel, run_tool_loop
from keel.synthesis.general.sandboxes import SLACK_S, GeneralSandboxes, reject_crashes
from keel.synthesis.ledger import Rejected

_SYSTEM: Message = {
    "role": "system",
    "content": "You build environments for training agents that call tools: a database, tools that "
    "read it, and tasks that are hard to solve and easy to verify.",
}
_DATABASE = """\
Category: {category}.{several}

Build a database for this category: several kinds of entities with numbers, texts and relations \
that tasks can put constraints on. There must be enough entities that the answer to a task is not \
obvious at a glance. {look_up}Write the database as one JSON file (an object of lists or objects) \
of at most {most_kib} KiB, for example by a Python program with a fixed seed. Inspect it, then \
submit it with submit_database."""
_TOOLS = """\
Category: {category}. This is the database, or its beginning:

{data}

Write tools.py. Each public function is a tool that reads the database: small and general, not one \
that solves a task. The global variable `database` is the value of the JSON file; do not open it \
yourself, and print nothing. Every parameter and result needs a specific type hint (str, int, \
float, bool, list[…], dict[…], Literal[…]), and every tool a docstring that describes its result. \
The same call must return the same result in every process, so do not use the clock, random \
numbers or the order of a set. Report errors as LookupError or ValueError with a helpful message. \
The names of helper functions begin with an underscore. You may import only from: {modules}. Do \
not use attributes that begin with an underscore, or str.format.

Reply with one section:

## tools
```python
…
```"""
_FIRST = "Now write a simple task that needs a few calls.\n\n"
_NEXT = """\
Now write a harder task over the same database: more constraints that depend on each other, more \
look-ups, conditions, an optimum. {measured}The last task's answer must be wrong for it. If the \
tools do not suffice, add new functions under a heading `## tools` before the other sections; the \
existing tools stay.

"""
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
_SHOWN = 6000


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
        self._category = {
            f"{slug(category)}-{number}": category
            for number in range(config.per_category)
            for category in config.categories
        }
        self.keys: Sequence[str] = list(self._category)
        self._author, self._reference, self._seed = author, reference, seed
        self._done = folder.absolute() / "tasks"
        self._sandboxes = GeneralSandboxes(folder.absolute() / "making", config)

    async def __aenter__(self) -> Self:
        self._done.mkdir(parents=True, exist_ok=True)
        await self._sandboxes.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._sandboxes.__aexit__(*error)

    async def make(self, key: str) -> None:
        done, path = self._done / key, self._sandboxes.making / key
        if done.exists():  # an earlier start ended before it wrote the ledger
            return
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        path.chmod(0o755)
        writer = _EnvironmentWriter(
            sandboxes=self._sandboxes,
            path=path,
            category=self._category[key],
            author=self._author,
            reference=self._reference,
            seed=seed_of(self._seed, key),
        )
        try:
            await writer.run()
            os.replace(path, done)
        finally:
            shutil.rmtree(path, ignore_errors=True)


@dataclass(kw_only=True)
class _EnvironmentWriter:
    """Lets the author model build one environment, in a folder below `sandboxes.making`. Its code
    never runs in this process. `reference` attempts the tasks to measure their difficulty."""

    sandboxes: GeneralSandboxes
    path: Path
    category: str
    author: Author
    reference: Author
    seed: int

    def __post_init__(self) -> None:
        self._refused: list[Rejected] = []
        self._files: dict[str, str] = dict.fromkeys(("tools.py", "solve.py", "verify.py"), "")
        self._tasks: list[dict[str, Any]] = []
        self._specs: Mapping[str, Mapping[str, Any]] = {}
        self._answers: list[Any] = []
        self._calls: list[int] = []
        self._passed: list[int] = []
        self._messages: list[Message] = []

    async def run(self) -> None:
        config = self.sandboxes.config
        await self._make_database()
        (shown,) = await self.sandboxes.workshop(
            "database", self.path, "shown", within_s=config.call_s, most=_SHOWN
        )
        modules = ", ".join(MODULES[1:])
        text = _TOOLS.format(category=self.category, data=shown, modules=modules)
        self._messages = [_SYSTEM, _user(text)]
        await self._revise("tools", self._write_tools)
        for step in range(config.steps):
            text, measured = _FIRST, ""
            if step:
                passed = self._passed[-1]
                if config.attempts and not passed:
                    break  # a harder task could not be measured
                if config.attempts:
                    attempts = f"{passed} of {config.attempts} attempts at the last task passed"
                    measured = f"{attempts}; fewer must pass at this one. "
                text = _NEXT.format(measured=measured)
            self._messages.append(_user(text + _TASK))
            try:
                await self._revise("task", self._write_task)
            except Rejected as refused:
                if step < config.least_tasks:
                    raise
                self._refused.append(refused)
                break
        if len(self._tasks) < config.least_tasks:
            reason = f"no attempt passes after {len(self._tasks)} tasks, fewer than "
            raise Rejected("harder", f"{reason}general.least_tasks = {config.least_tasks}")
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
            "drafts_refused": [[one.gate, one.reason] for one in self._refused],
        }
        self._put("provenance.json", _as_json(provenance))

    async def _make_database(self) -> None:
        config = self.sandboxes.config
        several, look_up = "", "Commands have no network. "
        if config.per_category > 1:
            number = int(self.path.name.rpartition("-")[2])
            several = f" It is number {number + 1} of {config.per_category}; make it different."
        if config.network:
            look_up = "Commands can reach the internet, so fetch real data where it helps. "
        if config.documents:
            facts = f"The folder {config.documents} has documents with facts for this. "
            look_up = facts + look_up
        text = _DATABASE.format(
            category=self.category,
            several=several,
            look_up=look_up,
            most_kib=config.database_kib,
        )

        async def call(call: ToolCall) -> ToolResult:
            result = await hosted.call(call, timeout_s=config.bash_s + SLACK_S)
            if call.name != "submit_database" or result.failed:
                return result
            self._put("database.json", result.text)
            return ToolResult(text="Submitted.", done=True)

        with reject_crashes("database"):
            async with self.sandboxes.open_desk() as (hosted, opening):
                worked = await run_tool_loop(
                    self.author,
                    [_SYSTEM, _user(text)],
                    tools=opening.tools,
                    call=call,
                    most_turns=config.max_turns,
                    purpose="database",
                )
        if worked.ended != "done":
            limits = {"turns": "general.max_turns", "length": "author.max_tokens or the context"}
            within = f" within {limits[worked.ended]}" if worked.ended in limits else ""
            raise Rejected("database", f"no database submitted{within}")

    async def _revise(self, purpose: str, write: Callable[[Parsed], Awaitable[None]]) -> None:
        """Ask the author for a draft, and pass it to `write`, which checks and stores it. If it is
        rejected, the author may revise it `general.revisions` times."""
        for remaining in reversed(range(self.sandboxes.config.revisions + 1)):
            reply = await self.author.ask(self._messages, purpose=purpose)
            self._messages.append(message_of(reply))
            try:
                return await write(reply)
            except Rejected as refused:
                if not remaining:
                    raise
                self._refused.append(refused)
                answer = f"Rejected ({refused.gate}): {refused.reason}"
                self._messages.append(_user(f"{answer}\n\nFix it, and write all sections again."))

    async def _write_tools(self, reply: Parsed) -> None:
        files = {**self._files, "tools.py": _split_sections(reply, ("tools",))["tools"]}
        self._write(files, [])
        self._specs = await self.sandboxes.describe(self.path)
        self._files = files

    async def _write_task(self, reply: Parsed) -> None:
        number = len(self._tasks)
        optional = ("tools",) if number else ()
        sections = _split_sections(reply, ("question", "solve", "verify"), optional)
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
        config = self.sandboxes.config

        async def passes() -> bool:
            try:
                async with self.sandboxes.open_episode(self.path, number) as (hosted, opening):
                    worked = await run_tool_loop(
                        self.reference,
                        opening.messages,
                        tools=opening.tools,
                        call=partial(hosted.call, timeout_s=config.call_s),
                        most_turns=config.max_turns,
                        purpose="attempt",
                    )
                    verdict = await hosted.verdict(worked.messages, "stop")
            except EnvironmentLost as error:
                if error.during == "parent":
                    raise
                return False  # because of its calls
            return isinstance(verdict, Verdict) and verdict.parts["correct"] == 1.0

        passed = sum(await gather_or_cancel(*(passes() for _ in range(config.attempts))))
        if config.attempts and self._passed and passed >= self._passed[-1]:
            reason = f"{passed} of {config.attempts} attempts of the reference policy pass, "
            raise Rejected("harder", f"{reason}{self._passed[-1]} at the task before")
        return passed

    def _write(self, files: dict[str, str], tasks: Sequence[dict[str, Any]]) -> None:
        for name, text in files.items():
            self._put(name, text)
        about = {"name": self.path.name, "category": self.category, "tasks": list(tasks)}
        self._put("task.json", _as_json(about))

    def _put(self, name: str, text: str) -> None:
        path = self.path / name
        path.write_bytes(text.encode(errors="replace"))
        path.chmod(0o644)  # as root, Keel runs the sandbox as another user


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


_HEADING = re.compile(
    r"^#+[ \t]*`?([a-z]+)(?:\.py|\.md)?`?[ \t]*:?[ \t]*$", re.MULTILINE | re.IGNORECASE
)
_BLOCK = re.compile(r"^(`{3,}|~{3,})[^\n]*\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)


def _split_sections(
    reply: Parsed, required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, str]:
    """Split a response into sections at its headings. A section's content is its first code block,
    or its text if it has none. Raises Rejected if a required section is missing."""
    if not reply.closed:
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
