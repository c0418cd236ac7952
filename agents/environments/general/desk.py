"""The environment in which an author builds a database, with a shell, a folder and no network."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
from typing import Any

MOST_SAID = 12_000
"""Maximum length of a command's output in characters. The first and last half of it are kept."""


class DatabaseDesk:
    """An environment for building one database. Only the database that is submitted is kept."""

    def __init__(self, most_kib: int, bash_s: float) -> None:
        self._most, self._bash_s = most_kib << 10, bash_s
        self.done = False

    def bash(self, command: str) -> str:
        """Run a command in bash, in a folder of your own. There is Python, and no network.

        Args:
            command: For example: python3 make.py && head -c 500 database.json
        """
        process = subprocess.Popen(
            ["bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=os.environ.get("TMPDIR", "/tmp"),
            start_new_session=True,
        )
        late = ""
        try:
            said, _ = process.communicate(timeout=self._bash_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            late = f"\n(ended after {self._bash_s:g} s)"
        text = said.decode(errors="replace")
        if len(text) > MOST_SAID:
            text = f"{text[: MOST_SAID // 2]}\n[…]\n{text[-MOST_SAID // 2 :]}"
        status = f"\n(exit status {process.returncode})" if process.returncode and not late else ""
        return text + late + status

    def submit_database(self, path: str) -> Any:
        """Hand the finished database over: a file that ends in .json or .sqlite.

        Args:
            path: For example: database.json
        """
        path = os.path.join(os.environ.get("TMPDIR", "/tmp"), path)
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
