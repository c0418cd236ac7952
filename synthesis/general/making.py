"""One environment in the making: database, tools, a simple task, and harder ones step by step."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from keel.agents.types import ToolResult
from keel.rl.turns import Message, ToolCall
from keel.synthesis.author import Author, Said
from keel.synthesis.general import gates, prompts
from keel.synthesis.general.attempts import Reference
from keel.synthesis.general.replies import renamed, sections
from keel.synthesis.general.rooms import SLACK_S, Rooms, lost_to
from keel.synthesis.general.search import SEARCH, Search
from keel.synthesis.ledger import Refused
from keel.synthesis.work import work

SHOWN = 6000
"""Characters of a database that the author is reminded of."""


class Making:
    """In a folder of `rooms.making`. Nothing of the author's runs in this process."""

    def __init__(
        self,
        rooms: Rooms,
        path: Path,
        *,
        category: str,
        number: int,
        author: Author,
        reference: Reference,
        search: Search | None,
        seed: int,
    ) -> None:
        self._rooms, self._path, self._config = rooms, path, rooms.config
        self._category, self._number, self._seed = category, number, seed
        self._author, self._reference, self._search = author, reference, search
        self._files: dict[str, str] = dict.fromkeys(("tools.py", "solve.py", "verify.py"), "")
        self._tasks: list[dict[str, Any]] = []
        self._specs: gates.Specs = {}
        self._answers: list[Any] = []
        self._calls: list[int] = []
        self._passed: list[int] = []
        self._messages: list[Message] = []
        self.drafts: list[Refused] = []
        """What was thrown away."""

    async def run(self) -> None:
        """Leaves the finished folder. Raises Refused, AuthorLost, BudgetSpent."""
        kind = await self._database()
        (shown,) = await self._rooms.workshop(
            "database",
            self._path,
            "shown",
            each_s=self._config.call_s,
            arguments={"most": SHOWN},
        )
        self._messages = prompts.tools(self._category, shown, kind)
        await self._revised("tools", self._first_tools)
        for step in range(self._config.steps):
            if self._config.attempts and self._passed and not self._passed[-1]:
                break  # nothing harder could be told from it
            passed = self._passed[-1] if self._passed else None
            task = prompts.harder_task(passed, self._config.attempts)
            self._messages.append(task if step else prompts.first_task())
            try:
                await self._revised("task", self._step)
            except Refused as refused:
                if step < self._config.least_tasks:
                    raise
                self.drafts.append(refused)
                break
        if len(self._tasks) < self._config.least_tasks:
            raise Refused(
                "harder",
                f"{len(self._tasks)} tasks, after which no attempt passes: less than "
                f"general.least_tasks = {self._config.least_tasks}",
            )
        self._write(self._files, self._tasks)
        self._provenance()

    async def _database(self) -> str:
        """Fills the folder's. Returns .json or .sqlite."""
        config, kind = self._config, ""

        async def call(call: ToolCall) -> ToolResult:
            nonlocal kind
            if call.name == SEARCH.name:
                assert self._search is not None
                try:
                    return ToolResult(text=await self._search(str(call.arguments["query"])))
                except ValueError as error:
                    return ToolResult(text=str(error), failed=True)
            result = await desk.call(call, timeout_s=config.bash_s + SLACK_S)
            if call.name != "submit_database" or result.failed:
                return result
            kind = self._taken(result.text)
            return ToolResult(text="It is there.", done=True)

        arguments = {"most_kib": config.database_kib, "bash_s": config.bash_s}
        with lost_to("database"):
            async with self._rooms.open("desk:DatabaseDesk", arguments=arguments) as (
                desk,
                opening,
            ):
                worked = await work(
                    self._author,
                    prompts.database(
                        self._category,
                        self._number,
                        config.per_category,
                        config.database_kib,
                        self._search is not None,
                    ),
                    tools=[*opening.tools, *([SEARCH] if self._search else [])],
                    call=call,
                    most_turns=config.max_turns,
                    purpose="database",
                )
        if not kind:
            ended = {
                "turns": "general.max_turns",
                "length": "author.max_tokens or the context",
            }.get(worked.ended)
            raise Refused("database", f"none was handed over{f' within {ended}' if ended else ''}")
        return kind

    def _taken(self, text: str) -> str:
        """What the desk says is the database: it is the author's to say."""
        try:
            said = json.loads(text)
            kind, data = said["name"], base64.b64decode(said["data"], validate=True)
        except (ValueError, TypeError, LookupError, binascii.Error) as error:
            raise Refused("database", f"cannot be read: {error}") from error
        if kind not in (".json", ".sqlite") or len(data) > self._config.database_kib << 10:
            raise Refused("database", "is none, or too large")
        _put(self._path / f"database{kind}", data)
        return kind

    async def _revised(self, purpose: str, hold: Callable[[Said], Awaitable[None]]) -> None:
        """The author's reply, written again as often as a gate refuses it. Raises Refused."""
        for left in reversed(range(self._config.revisions + 1)):
            said = await self._author.ask(self._messages, purpose=purpose)
            self._messages.append(said.message())
            try:
                try:
                    return await hold(said)
                except RecursionError as error:
                    raise Refused("solution", "an answer or a result is nested too deep") from error
            except Refused as refused:
                if not left:
                    raise
                self.drafts.append(refused)
                self._messages.append(prompts.refused(refused.gate, refused.reason))

    async def _first_tools(self, said: Said) -> None:
        files = {**self._files, "tools.py": sections(said, ("tools",))["tools"]}
        self._write(files, [])
        self._specs = await gates.typed(self._rooms, self._path)
        self._files = files

    async def _step(self, said: Said) -> None:
        number = len(self._tasks)
        found = sections(said, ("question", "solve", "verify"), ("tools",) if number else ())
        pieces = {
            "tools.py": found.get("tools", ""),
            "solve.py": renamed(found["solve"], "solve", number),
            "verify.py": renamed(found["verify"], "verify", number),
        }
        files = {name: _joined(self._files[name], piece) for name, piece in pieces.items()}
        task: dict[str, Any] = {"question": found["question"].strip(), "tools": []}
        specs = self._specs
        if "tools" in found:
            self._write(files, self._tasks)
            specs = await gates.typed(self._rooms, self._path)
        task["tools"] = list(specs)
        self._write(files, [*self._tasks, task])
        if "tools" in found:
            await self._earlier_hold(specs)
        answer, calls, passed = await hold_to_all(
            self._rooms,
            self._path,
            number,
            specs=specs,
            solution=pieces["solve.py"],
            earlier=self._answers,
            before=self._passed[-1] if self._passed else None,
            reference=self._reference,
            seed=self._seed,
        )
        self._files, self._specs = files, specs
        self._tasks.append(task)
        self._answers.append(answer)
        self._calls.append(calls)
        self._passed.append(passed)

    async def _earlier_hold(self, specs: gates.Specs) -> None:
        """Further tools leave the tasks before as they were."""
        for number in range(len(self._tasks)):
            found = await gates.solved(
                self._rooms, self._path, specs, self._files["solve.py"], number
            )
            if found.answer != self._answers[number]:
                raise Refused(
                    "earlier", f"with the further tools, the solution of task {number} is another"
                )

    def _write(self, files: dict[str, str], tasks: list[dict[str, Any]]) -> None:
        for name, text in files.items():
            _put(self._path / name, text.encode(errors="replace"))
        about = {"name": self._path.name, "category": self._category, "tasks": tasks}
        _write_json(self._path / "task.json", about)

    def _provenance(self) -> None:
        _write_json(
            self._path / "provenance.json",
            {
                "made": "by keel synthesize",
                "keel": version("keel-rl"),
                "date": datetime.now(UTC).date().isoformat(),
                "category": self._category,
                "author": self._author.name,
                "reference": self._reference.name,
                "seed": self._seed,
                "attempts": self._config.attempts,
                "passed": self._passed if self._config.attempts else None,
                "calls_of_the_solution": self._calls,
                "drafts_refused": [[one.gate, one.reason] for one in self.drafts],
            },
        )


async def hold_to_all(
    rooms: Rooms,
    path: Path,
    number: int,
    *,
    specs: gates.Specs,
    solution: str,
    earlier: list[Any],
    before: int | None,
    reference: Reference,
    seed: int,
) -> tuple[Any, int, int]:
    """Task `number` of a folder through every gate. earlier: answers of the tasks before; before:
    attempts that passed at the last of them. Returns the solution's answer, its number of calls,
    and how many attempts pass. Raises Refused, and RecursionError for an answer, or what a tool
    returns, that is nested too deep to be looked at."""
    solved = await gates.solved(rooms, path, specs, solution, number)
    again = await gates.solved(rooms, path, specs, solution, number, seed=seed + 1)
    await gates.verified(rooms, path, number, solved.answer, again.answer)
    await gates.grounded(rooms, specs, solution, number, solved)
    await gates.not_empty(rooms, path, number, solved.answer)
    await gates.not_mutated(rooms, path, number, solved.answer, seed=seed)
    await gates.not_easier(rooms, path, number, earlier)
    await gates.deterministic(rooms, path, specs, solved.calls, seed=seed)
    passed = 0
    if rooms.config.attempts:
        passed = await reference.passed(rooms, path, number)
        gates.harder(before, passed, rooms.config.attempts)
    return solved.answer, len(solved.calls), passed


def _joined(before: str, piece: str) -> str:
    return f"{before.rstrip()}\n\n\n{piece}" if before and piece else before or piece


def _write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    _put(path, text.encode(errors="replace"))


def _put(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o644)  # where Keel runs as root, the sandbox is a user of its own
