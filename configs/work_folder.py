"""The output folder of a resumable command. It is locked while the command runs, and can be reused
only with the same settings."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

from keel.configs.paths import write_whole
from keel.configs.sections.base import ConfigError

_SETTINGS = "settings.json"
_R = TypeVar("_R")


def read_records(path: Path, parse: Callable[[Any], _R], kind: str) -> list[_R]:
    """Parse the lines of a file written by Keel, ignoring an incomplete last line. Raises
    ConfigError with the file name and line number of a malformed line."""
    records: list[_R] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as {kind}: {error}") from error
    try:
        json.loads(lines[-1])
    except ValueError:  # empty or incomplete
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse(json.loads(line.decode("utf-8", "surrogatepass"))))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"missing key {error}" if isinstance(error, KeyError) else error
            raise ConfigError(f"{path}:{number}: not a line of {kind}: {reason}") from error
    return records


class WorkFolder:
    """A context manager that creates and locks a command's output folder."""

    def __init__(self, path: Path, knob: str, work: str) -> None:
        """Set up the object without creating the folder. Error messages name the setting `knob` and
        use `work` to describe what the command does."""
        self.path, self._knob, self._work = path, knob, work
        self._files: dict[str, BinaryIO] = {}

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
            stack.callback(self._close_files)
            self.resume()
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def resume(self) -> None:
        """Read what earlier starts of the command have left in the folder, once it is locked."""

    def error(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._knob} = {self.path}: {reason}")

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

    def records(self, name: str, parse: Callable[[Any], _R]) -> list[_R]:
        """Read the records that `append` has written to a file, if it exists."""
        path = self.path / name
        if not path.exists():
            return []
        self._open(name)  # reports an unusable file before the work begins
        return read_records(path, parse, f"this {self._work}")

    def append(self, name: str, record: Any) -> None:
        """Append a record to a JSON Lines file, in place of any incomplete last line."""
        text = json.dumps(record, ensure_ascii=False) + "\n"
        file = self._open(name)
        file.write(text.encode("utf-8", "surrogatepass"))
        file.flush()

    def _open(self, name: str) -> BinaryIO:
        """Open a file for appending, unless it is open, and remove any incomplete last line."""
        if name not in self._files:
            try:
                self._files[name] = file = (self.path / name).open("a+b")
            except OSError as error:
                raise self.error(f"{name} cannot be opened: {error.strerror}") from error
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        return self._files[name]

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
