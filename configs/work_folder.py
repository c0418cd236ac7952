"""The output folder of a resumable command. It is locked while the command runs, and can be reused
only with the same settings."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Self

from keel.configs.paths import write_whole
from keel.configs.sections.base import ConfigError

_SETTINGS = "settings.json"


class WorkFolder:
    """A context manager that creates and locks a command's output folder."""

    def __init__(self, path: Path, knob: str, work: str) -> None:
        """Set up the object without creating the folder. Error messages name the setting `knob` and
        use `work` to describe what the command does."""
        self.path, self._label, self._work = path, f"{knob} = {path}", work

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((self.path / ".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                running = isinstance(error, BlockingIOError)
                why = f"another {self._work} is running" if running else error.strerror
                raise self.error(f"{why}. Choose another folder") from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def error(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._label}: {reason}")

    def changed(self, settings: Mapping[str, Any]) -> list[str]:
        """Return one line for each difference from the recorded settings, or [] if nothing has been
        recorded. Raises ConfigError if the recorded settings can't be read."""
        path = self.path / _SETTINGS
        if not path.exists():
            return []
        try:
            recorded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            keys = {**recorded, **settings}
        except (OSError, ValueError, TypeError) as error:
            raise self.error(f"{path} cannot be read: {error}") from error
        current: Mapping[str, Any] = json.loads(json.dumps(settings))
        return [
            f"{key}: {recorded.get(key, '(absent)')} → {current.get(key, '(absent)')}"
            for key in keys
            if recorded.get(key) != current.get(key)
        ]

    def claim(self, settings: Mapping[str, Any]) -> None:
        self.write(_SETTINGS, json.dumps(settings, indent=1) + "\n")

    def write(self, name: str, text: str) -> None:
        write_whole(self.path / name, text)

    def lines(self, name: str) -> _JsonLines:
        """Open a JSON Lines file for appending, after removing any incomplete last line. Raises
        ConfigError if it can't be opened."""
        try:
            file = self._stack.enter_context((self.path / name).open("a+b"))
        except OSError as error:
            raise self.error(f"{name} cannot be opened: {error.strerror}") from error
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        return _JsonLines(file)


class _JsonLines:
    """A JSON Lines file that is flushed after every line."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self) -> list[Any]:
        self._file.seek(0)
        values: list[Any] = []
        for number, line in enumerate(self._file, start=1):
            try:
                values.append(json.loads(line.decode("utf-8", "surrogatepass")))
            except ValueError as error:
                raise ValueError(f"{self._file.name}:{number}: {error}") from error
        return values

    def add(self, line: Any) -> None:
        text = json.dumps(line, ensure_ascii=False) + "\n"
        self._file.write(text.encode("utf-8", "surrogatepass"))
        self._file.flush()
