"""Data classes for the contents of the page, and their conversion to JSON."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from typing import Any, Literal, cast

UNREADABLE = (
    *(OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, RecursionError),
)
"""Errors raised when a file is damaged, has unexpected contents, or no longer exists."""
_HEAD, _TAIL = 70, 50
"""Number of characters to show from the beginning and from the end of a question in the list."""


@dataclass(slots=True, kw_only=True)
class ReportGroup:
    """An entry in the page's list of trajectories: the group of one prompt."""

    step: int
    chunk: str
    """Name of the chunk that contains the trajectories."""
    line: int
    """Line number within the chunk, counted from 0."""
    prompt: str
    """ID of the prompt."""
    question: str
    """Beginning and end of the prompt's last message, on one line."""
    domain: str
    rewards: list[float]
    tokens: list[int]
    """Number of sampled tokens in each trajectory."""


def listed(group: Mapping[str, Any], step: int, chunk: str, line: int) -> ReportGroup:
    """Convert a line of a chunk to an entry in the list.

    Raises one of `UNREADABLE` if the line is not a group.
    """
    return ReportGroup(
        step=step,
        chunk=chunk,
        line=line,
        prompt=str(group["prompt"]),
        question=_question(group),
        domain=str(group["domain"]),
        rewards=[number(one["reward"]) or 0.0 for one in group["trajectories"]],
        tokens=[int(one["tokens"]) for one in group["trajectories"]],
    )


def _question(group: Mapping[str, Any]) -> str:
    """Return the last message before the policy's first turn. For an episode, it is taken from the
    transcript."""
    messages = list(group.get("messages") or ())
    for one in group["trajectories"]:
        messages = messages or list(one.get("messages") or ())[: one.get("opening") or 0]
    content: Any = (messages[-1].get("content") if messages else "") or ""
    text = " ".join((content if isinstance(content, str) else as_json(content)).split())
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]} … {text[-_TAIL:]}"


@dataclass(frozen=True, slots=True)
class ReportChunk:
    """Compressed JSON lines with one group per line. They are read on demand."""

    read: Callable[[], bytes]
    size: int
    """Size in bytes, known before the chunk is read."""

    def data(self) -> bytes:
        """Read and return the chunk. Raises OSError if that fails for any reason."""
        try:
            return self.read()
        except UNREADABLE as error:
            raise OSError(str(error)) from error


Chunks = dict[str, ReportChunk]


@dataclass(slots=True, kw_only=True)
class RunData:
    """The data of a run or an evaluation that the page shows."""

    name: str
    kind: Literal["run", "evaluation"]
    path: str
    steps: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])
    """End time of each step in `steps`, in seconds since 1970."""
    metrics: dict[str, list[float | None]] = field(default_factory=dict[str, list[float | None]])
    """The values of each metric, one per step in `steps`. A missing value is None."""
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Step, time, kind and text of each event."""
    knobs: dict[str, str] = field(default_factory=dict[str, str])
    """The value of each knob as JSON."""
    changed: list[str] = field(default_factory=list[str])
    """Names of the knobs that differ from their defaults."""
    summary: dict[str, str] = field(default_factory=dict[str, str])
    """Labels and texts of the table at the top of the page."""
    groups: list[ReportGroup] = field(default_factory=list[ReportGroup])
    notes: list[str] = field(default_factory=list[str])
    """Descriptions of what is missing, and why."""

    @property
    def costs(self) -> dict[str, float]:
        """The run's total costs, by metric. Empty if none were recorded."""
        return {
            name: sum(filter(None, values))
            for name, values in self.metrics.items()
            if name.startswith("cost/")
        }

    def plain(self) -> dict[str, Any]:
        """Convert to plain data. Each metric becomes its values and their positions in `steps`."""
        metrics: dict[str, dict[str, list[Any]]] = {}
        for name, values in self.metrics.items():
            at = [place for place, value in enumerate(values) if value is not None]
            metrics[name] = {"at": at, "values": [values[place] for place in at]}
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "metrics": metrics,
            "groups": [asdict(group) for group in self.groups],
        }


def loads(text: str | bytes) -> Any:
    """Parse JSON written by Python. Numbers such as NaN become None.

    Raises one of `UNREADABLE` if the text cannot be parsed.
    """
    return json.loads(text, parse_constant=lambda _: None)


def number(value: object) -> float | None:
    """Return `value` as a float, or None if it is not a finite number."""
    try:
        result = float(value) if isinstance(value, int | float) else None
    except OverflowError:  # of hundreds of digits
        return None
    return result if result is not None and isfinite(result) else None


def packed(lines: list[str]) -> bytes:
    """Compress JSON lines and return them as a chunk."""
    return gzip.compress("".join(f"{line}\n" for line in lines).encode(), 6, mtime=0)


def as_json(value: Any) -> str:
    """Return ASCII JSON for browsers. Numbers that JSON cannot represent become null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # rare, and slow: every value is visited
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in cast(dict[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast(Sequence[Any], value)]
    return value
