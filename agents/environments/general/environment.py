"""Environments for tasks that an author model writes. In `General`, the policy uses the author's
tools and submits an answer. The synthesis pipeline uses the other environments to let the author
build a database and to run the author's code."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from keel.agents.env_runtime import processes
from keel.agents.env_runtime.tool_objects import EnvironmentGone, InvalidEnvironment
from keel.agents.environments.general.author_code import (
    SUBMIT,
    Child,
    ChildEnded,
    Folder,
    parse_answer,
    resolve_folders,
    run_verifier,
    start_solution,
    start_tools,
)


class General:
    """An environment that an author model wrote, with tools and a verifier.

    Tasks are numbered across all folders. The number is given by the name of the prompt (`name/n`)
    or by its `reward` (`{"general": {"task": 3}}`). The tools run in a process that is forked
    before anything else is read and that cannot open files. Therefore, not even a tool that the
    policy controls can read an answer.
    """

    def __init__(self, folder: str | Sequence[str], verify_s: float = 20.0) -> None:
        """Load the environments in `folder`. An answer counts as wrong if its verifier takes longer
        than `verify_s` seconds."""
        self._folders = resolve_folders([folder] if isinstance(folder, str) else folder)
        self._verify_s = verify_s
        self._tools: Child | None = None
        self._submitted: str | None = None
        self.offered: Sequence[Mapping[str, Any]] = ()
        self.done = False

    def opening(self, task: Mapping[str, Any], seed: int) -> str:
        self._folder, self._number = self._named(task)
        self._tools = start_tools(self._folder, seed)
        chosen = self._folder.tasks()[self._number]
        specs: dict[str, Any] = self._asked({"do": "describe"})
        if missing := [name for name in chosen["tools"] if name not in specs]:
            raise ValueError(f"{self._folder.path}: tools.py has no {missing[0]!r}")
        keys = ("name", "description", "parameters")
        self.offered = [
            *({key: specs[name][key] for key in keys} for name in chosen["tools"]),
            SUBMIT,
        ]
        return chosen["question"]

    def _named(self, task: Mapping[str, Any]) -> tuple[Folder, int]:
        name = str(task.get("prompt_id", "")).rpartition("/")[2]
        number = task.get("reward", {}).get("general", {}).get("task", name)
        if not str(number).isdecimal():
            raise ValueError(f"task {task.get('prompt_id')!r} does not end with a number")
        index = int(number)
        for folder in self._folders:
            count = len(folder.tasks())
            if index < count:
                return folder, index
            index -= count
        count = int(number) - index
        raise ValueError(f"there is no task {number}: the folders have {count} (set `size`)")

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        if name == SUBMIT["name"]:
            if self._submitted is None:
                self._submitted = arguments["answer_text"]
            self.done = True
            return "Submitted."
        return self._asked({"do": "call", "name": name, "arguments": arguments})

    def _asked(self, request: dict[str, Any]) -> Any:
        assert self._tools is not None
        try:
            return self._tools.ask(request)
        except ChildEnded as error:
            raise EnvironmentGone(f"the tools: {error}") from error

    def verdict(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Verify the submitted answer. `share` is the fraction of requirements that are met, and
        `correct` is 1 only if all are."""
        if self._submitted is None:
            return {"correct": 0.0, "share": 0.0}, {"submitted": False}
        answer = parse_answer(self._submitted)
        met = run_verifier(self._folder, self._number, answer, self._verify_s)
        if isinstance(met, str):  # caused by the answer: the pipeline checked the verifier
            return {"correct": 0.0, "share": 0.0}, {"submitted": True, "verifier": met}
        share = sum(met.values()) / len(met)
        unmet = [name for name, ok in met.items() if not ok]
        return {"correct": float(not unmet), "share": share}, {"submitted": True, "not met": unmet}

    def close(self) -> None:
        if self._tools is not None:
            self._tools.end()


_SHOWN = 3


class Solution:
    """Runs a solution, which can see only its own source code and the names of the tools."""

    def opening(self, task: Mapping[str, Any], seed: int) -> None:
        spec = task["reward"]
        self._child = start_solution(spec["source"], spec["number"], spec["returns"])

    def go(self, tool_result: dict[str, Any]) -> Any:
        """Send the result of the last tool call. Returns the next call, or {"is": the answer} at
        the end."""
        try:
            if tool_result:
                self._child.send(tool_result)
            reply = self._child.receive()
        except ChildEnded as error:
            raise InvalidEnvironment(f"the solution: {error}") from error
        return reply

    def close(self) -> None:
        self._child.end()


class AuthorWorkshop:
    """Runs the tools and verifiers that an author model wrote. The task's reward names their folder
    as `environment`. Each request can take up to `within_s` seconds."""

    def opening(self, task: Mapping[str, Any], seed: int) -> None:
        self._folder = Folder(Path(task["reward"]["environment"]))
        self._within_s, self._seed = task["reward"]["within_s"], seed

    def describe(self) -> Any:
        """Return the tool descriptions by name."""
        (reply,) = self._told([{"do": "describe"}])
        if "raised" in reply:
            raise InvalidEnvironment(str(reply["raised"]))
        return reply["is"]

    def results(self, calls: list[dict[str, Any]]) -> Any:
        """Run the tool calls in order. Returns {"is": text} or {"raised": text} for each."""
        return self._told(
            [{"do": "call", "name": one["name"], "arguments": one["arguments"]} for one in calls]
        )

    def _told(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        child = start_tools(self._folder, self._seed)
        try:
            replies: list[dict[str, Any]] = []
            for request in requests:
                child.send(request)
                replies.append(child.receive(self._within_s))
                if "refused" in replies[-1]:
                    raise InvalidEnvironment(str(replies[-1]["refused"]))
            return replies
        except ChildEnded as error:
            raise InvalidEnvironment(f"tools.py: {error}") from error
        finally:
            child.end()

    def verdicts(self, number: int, answers: list[Any]) -> Any:
        """Verify each answer in a separate process. Returns which requirements it meets, or an
        error message."""
        return [run_verifier(self._folder, number, answer, self._within_s) for answer in answers]

    def strings(self, most: int) -> list[str]:
        """Return up to `most` distinct strings from the database, in order."""
        database: Any = self._folder.database()
        if type(database) in (dict, list):
            return list(dict.fromkeys(_strings_in(database)))[:most]
        texts = dict[str, None]()
        for _, quoted in _tables(database):
            for row in database.execute(f"SELECT * FROM {quoted} LIMIT 1000"):
                texts |= dict.fromkeys(_strings_in(list(row)))
        return list(texts)[:most]

    def shown(self, most: int) -> list[str]:
        """Return example entries from each table or top-level key of the database, with at most
        `most` characters in total."""
        database: Any = self._folder.database()
        parts = list[str]()
        if type(database) not in (dict, list):
            for sql, quoted in _tables(database):
                rows = database.execute(f"SELECT * FROM {quoted} LIMIT {_SHOWN}")
                texts = [json.dumps(dict(row), ensure_ascii=False, default=str) for row in rows]
                parts.append("\n".join([sql, *texts]))
            return ["\n\n".join(parts)[:most]]
        kinds = cast(dict[str, Any], database if type(database) is dict else {"": database})
        for name, kind in kinds.items():
            first, count = kind, 0
            if isinstance(kind, dict | list):
                entries = cast(Any, kind)
                count = len(entries)
                is_list = isinstance(kind, list)
                first = entries[:_SHOWN] if is_list else dict(list(entries.items())[:_SHOWN])
            more = f" … {count} in all" if count > _SHOWN else ""
            parts.append(f"{name}: {json.dumps(first, ensure_ascii=False)}{more}")
        return ["\n".join(parts)[:most]]


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from cast(dict[str, Any], value)
        value = list(cast(dict[str, Any], value).values())
    for item in cast(list[Any], value) if isinstance(value, list) else ():
        yield from _strings_in(item)


def _tables(database: Any) -> list[tuple[str, str]]:
    rows = database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
    return [(sql, '"' + name.replace('"', '""') + '"') for name, sql in rows]


class DatabaseDesk:
    """An environment in which an author model builds a database. Only the submitted database is
    kept."""

    def __init__(self, most_kib: int, bash_s: float) -> None:
        self._most, self._bash_s = most_kib << 10, bash_s
        self._folder = os.environ.get("TMPDIR", "/tmp")
        self.done = False

    def bash(self, command: str) -> str:
        """Run a command in bash, in a folder of your own. There is Python.

        Args:
            command: For example: python3 make.py && head -c 500 database.json
        """
        status, text = processes.run(
            ["bash", "-c", command], env=os.environ, folder=self._folder, within_s=self._bash_s
        )
        if status is None:
            return f"{text}\n(ended after {self._bash_s:g} s)"
        return f"{text}\n(exit status {status})" if status else text

    def submit_database(self, path: str) -> Any:
        """Hand the finished database over: a file that ends in .json or .sqlite.

        Args:
            path: For example: database.json
        """
        path = os.path.join(self._folder, path)
        with open(path, "rb") as file:
            data = file.read(self._most + 1)
        if len(data) > self._most:
            raise ValueError(f"{path} has more than {self._most >> 10} KiB; make it smaller")
        if path.endswith(".sqlite"):
            if not data.startswith(b"SQLite format 3\0"):
                raise ValueError(f"{path} is no SQLite database")
        elif not path.endswith(".json"):
            raise ValueError("the database's file must end in .json or .sqlite")
        elif not isinstance(json.loads(data), dict | list):
            raise ValueError(f"{path} must hold an object or a list")
        self.done = True
        return {"name": os.path.splitext(path)[1], "data": base64.b64encode(data).decode()}
