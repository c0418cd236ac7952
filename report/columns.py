"""Metrics of a run by columns: each line is read once, however often somebody looks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.report.files import number, objects

APART = ("step", "time")


@dataclass(slots=True)
class Columns:
    """Of `metrics.jsonl`, which grows, or is another one after a resume."""

    steps: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])
    metrics: dict[str, list[float | None]] = field(default_factory=dict[str, list[float | None]])
    """One value for each of `steps`."""
    notes: list[str] = field(default_factory=list[str])
    """On lines that cannot be read."""
    edition: int = 0
    """Goes up whenever something else has changed than what there is at the end."""
    _end: int = 0
    _lines: int = 0
    _last: bytes = b""
    """How far the file is read: bytes and lines, and the last line, by which it is known again."""

    def read(self, path: Path) -> None:
        """What has come since; all of another file. Raises OSError."""
        data = b""
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._end - len(self._last))
                data = file.read()
                if not data.startswith(self._last):
                    file.seek(0)
                    data = self._forget() + file.read()
        elif self._end:
            self._forget()
        lines = data.removeprefix(self._last).split(b"\n")[:-1]
        for line in objects(lines, path, self.notes, self._lines + 1):
            self._add(line)
        if lines:
            self._end += sum(len(line) + 1 for line in lines)
            self._lines, self._last = self._lines + len(lines), lines[-1] + b"\n"

    def _forget(self) -> bytes:
        self.steps, self.times, self.metrics, self.notes = [], [], {}, []
        self._end, self._lines, self._last = 0, 0, b""
        self.edition += 1
        return b""

    def _add(self, line: Mapping[str, Any]) -> None:
        """Two lines of a step, of an evaluation that came late, are one."""
        step = line.get("step")
        if not isinstance(step, int) or number(step) is None:
            return
        at = bisect_left(self.steps, step)
        self.edition += at < len(self.steps)
        if self.steps[at : at + 1] != [step]:
            self.steps.insert(at, step)
            self.times.insert(at, number(line.get("time")) or 0.0)
            for column in self.metrics.values():
                column.insert(at, None)
        for name in line.keys() - APART:
            column = self.metrics.setdefault(name, [None] * len(self.steps))
            if column[at] is None:
                column[at] = number(line[name])
