"""Data of the page, and its JSON."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, cast

from keel.commands.report.files import UNREADABLE, brief, number

HEAD, TAIL = 70, 50
"""Characters of a question's beginning and end in the list of groups."""


@dataclass(slots=True, kw_only=True)
class ReportGroup:
    """A line in the list of trajectories."""

    step: int
    chunk: str
    """Name of the chunk that holds its trajectories."""
    line: int
    """Line of the chunk, from 0."""
    prompt: str
    """The prompt's id."""
    question: str
    """Beginning and end of the prompt's last message, on one line."""
    domain: str
    rewards: list[float]
    tokens: list[int]
    """Sampled tokens of each trajectory."""


def listed(group: Mapping[str, Any], step: int, chunk: str, line: int) -> ReportGroup:
    """List a line of a chunk. Raises one of `UNREADABLE` for anything else."""
    return ReportGroup(
        step=step,
        chunk=chunk,
        line=line,
        prompt=str(group["prompt"]),
        question=question_of(group),
        domain=str(group["domain"]),
        rewards=[number(one["reward"]) or 0.0 for one in group["trajectories"]],
        tokens=[int(one["tokens"]) for one in group["trajectories"]],
    )


def question_of(group: Mapping[str, Any]) -> str:
    """The last message before the policy speaks; of an episode, from its transcript."""
    messages = list(group.get("messages") or ())
    for one in group["trajectories"]:
        messages = messages or list(one.get("messages") or ())[: one.get("opening") or 0]
    content: Any = (messages[-1].get("content") if messages else "") or ""
    text = " ".join((content if isinstance(content, str) else as_json(content)).split())
    if len(text) <= HEAD + TAIL:
        return text
    head, tail = text[:HEAD], text[-TAIL:]
    return f"{head.rpartition(' ')[0] or head} … {tail.partition(' ')[2] or tail}"


@dataclass(frozen=True, slots=True)
class ReportChunk:
    """Compressed lines of JSON, one group a line, that are read on demand."""

    read: Callable[[], bytes]
    size: int
    """Approximate bytes, known without reading them."""

    def data(self) -> bytes:
        """Read the chunk. Raises OSError if that fails in any way."""
        try:
            return self.read()
        except UNREADABLE as error:
            raise OSError(brief(error)) from error


Chunks = dict[str, ReportChunk]


@dataclass(slots=True, kw_only=True)
class RunData:
    """A run, or an evaluation."""

    name: str
    kind: Literal["run", "evaluation"]
    path: str
    steps: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])
    """Seconds since 1970 at which each of `steps` ended."""
    metrics: dict[str, list[float | None]] = field(default_factory=dict[str, list[float | None]])
    """One value for each of `steps`; None if it is missing."""
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """step, time, kind and text of each."""
    knobs: dict[str, str] = field(default_factory=dict[str, str])
    changed: list[str] = field(default_factory=list[str])
    """Knobs that differ from their defaults."""
    summary: dict[str, str] = field(default_factory=dict[str, str])
    """Label → text, for the table at the top."""
    groups: list[ReportGroup] = field(default_factory=list[ReportGroup])
    notes: list[str] = field(default_factory=list[str])
    """Missing parts, and why."""

    def plain(self) -> dict[str, Any]:
        """Plain data; each metric as its values and their places in `steps`."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "metrics": {name: sparse(values) for name, values in self.metrics.items()},
            "groups": [asdict(group) for group in self.groups],
        }


def sparse(values: Sequence[float | None]) -> dict[str, list[Any]]:
    known = [(at, value) for at, value in enumerate(values) if value is not None]
    return {"at": [at for at, _ in known], "values": [value for _, value in known]}


def packed(lines: list[str]) -> bytes:
    """A chunk of lines of JSON, compressed."""
    return gzip.compress("".join(f"{line}\n" for line in lines).encode(), 6, mtime=0)


def as_json(value: Any) -> str:
    """ASCII that a browser can read: null for numbers that JSON does not know."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # rare, and slow: every value is visited
        return json.dumps(finite(value), allow_nan=False, separators=(",", ":"))


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in cast(dict[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in cast(Sequence[Any], value)]
    return value
