"""The folder of an environment that an author has written. It contains these files:

database.json      or database.sqlite
tools.py           the tools, which are typed functions over `database`
task.json          {"name", "category", "tasks": [{"question", "tools": [names]}, …]},
                   with easy tasks first
solve.py           solve_0(tools), solve_1(tools), …, which no environment or policy reads
verify.py          verify_0(answer, database), …, which return a bool or one for each demand
provenance.json    how the environment was made
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True)
class Folder:
    """The folder that contains one environment."""

    path: Path

    def text(self, name: str) -> str:
        return (self.path / name).read_text(encoding="utf-8")

    def tasks(self) -> list[dict[str, Any]]:
        """Return the tasks in order.

        Raises ValueError if task.json is invalid.
        """
        try:
            tasks: list[dict[str, Any]] = json.loads(self.text("task.json"))["tasks"]
            for task in tasks:
                _ = str(task["question"]), list(task["tools"])
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(f"{self.path / 'task.json'}: {error!r}") from error
        return tasks

    def database(self) -> Any:
        """Return a new copy of the database, as a JSON value or an SQLite connection."""
        file = self.path / "database.sqlite"
        if not file.exists():
            return json.loads(self.text("database.json"))
        connection = sqlite3.connect(":memory:")
        connection.deserialize(file.read_bytes())  # type: ignore[attr-defined]
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.row_factory = sqlite3.Row
        return connection


def folders(names: Sequence[str]) -> list[Folder]:
    """Return the folders of the named environments in order.

    Each name is an environment's folder, a folder that contains several, a bundled environment, or
    `shipped` for all bundled ones. Raises ValueError if a name is not found.
    """
    environments: list[Folder] = []
    for name in names:
        own = SHIPPED if name == "shipped" else SHIPPED / name
        path = own if "/" not in name and not Path(name).exists() else Path(name).expanduser()
        if (path / "task.json").is_file():
            environments.append(Folder(path))
            continue
        inside = sorted(each.parent for each in path.glob("*/task.json"))
        if not inside:
            known = ", ".join(each.name for each in sorted(SHIPPED.glob("*")))
            raise ValueError(
                f"{name} is no folder of tasks, nor has it any (looked in {path}; in a sandbox it "
                f"must be among `readable`). Bundled ones: {known}"
            )
        environments += map(Folder, inside)
    return environments
