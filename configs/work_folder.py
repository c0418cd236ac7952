"""A folder that a command fills line by line: locked while it does, and claimed by the settings
that the lines depend on, so that a stopped command goes on where it was and no other mixes its own
lines in."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Self

from keel.configs.sections.base import ConfigError

SETTINGS = "settings.json"


class WorkFolder:
    """Open as a context: it is there, and nobody else's, while open."""

    def __init__(self, path: Path, knob: str, work: str) -> None:
        """knob: that names it; work: what is done there, for people."""
        self.path, self._named, self._work = path, f"{knob} = {path}", work

    def __enter__(self) -> Self:
        """Raises ConfigError if it cannot be written or is in use."""
        self._stack = ExitStack()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = self._stack.enter_context((self.path / ".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._stack.close()
            raise self.refused(
                f"another {self._work} is running there; choose another folder"
            ) from error
        except OSError as error:
            self._stack.close()
            raise self.refused(f"cannot be written ({error.strerror})") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def refused(self, why: str) -> ConfigError:
        """To be raised."""
        return ConfigError(f"{self._named}: {why}")

    def changed(self, settings: Mapping[str, Any]) -> list[str]:
        """What differs from the settings that it was claimed with, a line each; nothing where it
        was not. Raises ConfigError where they cannot be read."""
        path = self.path / SETTINGS
        if not path.exists():
            return []
        try:
            theirs: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            keys = {**theirs, **settings}
        except (OSError, ValueError, TypeError) as error:
            raise self.refused(f"{path} cannot be read: {error}") from error
        ours: Mapping[str, Any] = json.loads(json.dumps(settings))
        return [
            f"{key}: {theirs.get(key, '(absent)')} → {ours.get(key, '(absent)')}"
            for key in keys
            if theirs.get(key) != ours.get(key)
        ]

    def claim(self, settings: Mapping[str, Any]) -> None:
        """From now on it is theirs."""
        self.write(SETTINGS, json.dumps(settings, indent=1) + "\n")

    def write(self, name: str, text: str) -> None:
        """A file, whole or not at all. Raises ConfigError."""
        try:
            fresh = self.path / f".{name}.tmp"
            fresh.write_bytes(text.encode("utf-8", "surrogatepass"))
            fresh.replace(self.path / name)
        except OSError as error:
            raise self.refused(f"{name} cannot be written ({error.strerror})") from error

    def lines(self, name: str) -> Lines:
        """A file of JSON lines, to be added to. A last line that was cut off while it was written
        is taken away. Raises ConfigError."""
        try:
            file = self._stack.enter_context((self.path / name).open("a+b"))
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        except OSError as error:
            raise self.refused(f"{name} cannot be written ({error.strerror})") from error
        return Lines(file)


class Lines:
    """JSON lines, each in the file once it has been added."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self) -> list[Any]:
        """All that are there. Raises ValueError naming file and line."""
        self._file.seek(0)
        found: list[Any] = []
        for number, line in enumerate(self._file, start=1):
            try:
                found.append(json.loads(line.decode("utf-8", "surrogatepass")))
            except ValueError as error:
                raise ValueError(f"{self._file.name}:{number}: {error}") from error
        return found

    def add(self, line: Any) -> None:
        text = json.dumps(line, ensure_ascii=False) + "\n"
        self._file.write(text.encode("utf-8", "surrogatepass"))
        self._file.flush()
