"""What the page is given. Plain data, as it stands in the page as JSON."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast


@dataclass(slots=True, kw_only=True)
class Group:
    """A line in the list of what can be read."""

    step: int
    chunk: str
    """Where its trajectories are."""
    line: int
    """Which line of it, counted from 0."""
    prompt: str
    domain: str
    rewards: list[float]
    tokens: list[int]
    """Sampled by each."""


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
    """One value for each of `steps`; None where there is none."""
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """step, time, kind and text of each."""
    knobs: dict[str, str] = field(default_factory=dict[str, str])
    summary: dict[str, str] = field(default_factory=dict[str, str])
    """In few words, for the table of runs."""
    groups: list[Group] = field(default_factory=list[Group])
    notes: list[str] = field(default_factory=list[str])
    """What is not there, and why."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def packed(lines: list[str]) -> bytes:
    """A chunk: lines of JSON, compressed."""
    return gzip.compress("".join(f"{line}\n" for line in lines).encode(), 6, mtime=0)


def as_json(value: Any) -> str:
    """ASCII that a browser can read: null for numbers that JSON does not know."""
    return json.dumps(finite(value), allow_nan=False, separators=(",", ":"))


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in cast(dict[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in cast(Sequence[Any], value)]
    return value
