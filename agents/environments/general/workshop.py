"""Environments for the pipeline, in which an author builds a database and the author's code is
run."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from keel.agents.env_runtime.errors import InvalidEnvironment
from keel.agents.environments.code import processes
from keel.agents.environments.general.author_code import (
    ChildEnded,
    Folder,
    solving_child,
    tools_child,
    verified,
)

_SHOWN = 3


class Solution:
    """A running solution. It gets only its own source code and the names of the tools."""

    def opening(self, task: Mapping[str, Any], seed: int) -> None:
        spec = task["reward"]
        self._child = solving_child(spec["source"], spec["number"], spec["returns"])

    def go(self, said: dict[str, Any]) -> Any:
        """Send the result of a call. Returns the next call, or {"is": the answer} at the end."""
        try:
            if said:
                self._child.send(said)
            reply = self._child.receive()
        except ChildEnded as error:
            raise InvalidEnvironment(f"the solution: {error}") from error
        return reply

    def close(self) -> None:
        self._child.end()


class AuthorWorkshop:
    """Runs the tools and verifiers in the folder `environment` of the task's reward. Each request
    may take `within_s` seconds."""

    def opening(self, task: Mapping[str, Any], seed: int) -> None:
        self._folder = Folder(Path(task["reward"]["environment"]))
        self._within_s, self._seed = task["reward"]["within_s"], seed

    def describe(self) -> Any:
        """Return the descriptions of the tools, keyed by name."""
        (reply,) = self._told([{"do": "describe"}])
        if "raised" in reply:
            raise InvalidEnvironment(str(reply["raised"]))
        return reply["is"]

    def results(self, calls: list[dict[str, Any]]) -> Any:
        """Run the calls in order. Returns {"is": text} or {"raised": text} for each call."""
        return self._told(
            [{"do": "call", "name": one["name"], "arguments": one["arguments"]} for one in calls]
        )

    def _told(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        child = tools_child(self._folder, self._seed)
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
        """Verify each answer in its own process, and return the result of `verified` for each
        answer."""
        return [verified(self._folder, number, answer, self._within_s) for answer in answers]

    def strings(self, most: int) -> list[str]:
        """Return the strings in the database in order and without duplicates, at most `most` of
        them."""
        database: Any = self._folder.database()
        texts = dict[str, None]()
        pending: list[Any] = [database] if type(database) in (dict, list) else []
        for _, quoted in [] if pending else _tables(database):
            for row in database.execute(f"SELECT * FROM {quoted} LIMIT 1000"):
                texts.update(dict.fromkeys(one for one in row if isinstance(one, str)))
        while pending:
            one = pending.pop()
            if isinstance(one, str):
                texts[one] = None
            elif isinstance(one, dict):
                entries = cast(dict[str, Any], one)
                pending += [*reversed(entries.values()), *reversed(entries)]
            elif isinstance(one, list):
                pending += reversed(cast(list[Any], one))
        return list(texts)[:most]

    def shown(self, most: int) -> list[str]:
        """Return examples of each kind of entry in the database, with at most `most` characters in
        total."""
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


def _tables(database: Any) -> list[tuple[str, str]]:
    """Return the CREATE statement and the quoted name of each table in an SQLite database."""
    rows = database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
    return [(sql, '"' + name.replace('"', '""') + '"') for name, sql in rows]


class DatabaseDesk:
    """An environment for building a database. Only the submitted database is kept."""

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
