"""What the page is given. Plain data, as it stands in the page as JSON."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, cast

from keel.report.files import UNREADABLE, brief, number


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


def listed(group: Mapping[str, Any], step: int, chunk: str, line: int) -> Group:
    """Of a line of a chunk. Ends in `UNREADABLE`."""
    return Group(
        step=step,
        chunk=chunk,
        line=line,
        prompt=str(group["prompt"]),
        domain=str(group["domain"]),
        rewards=[number(one["reward"]) or 0.0 for one in group["trajectories"]],
        tokens=[int(one["tokens"]) for one in group["trajectories"]],
    )


class Chunks(MutableMapping[str, bytes]):
    """Lines of JSON, a group each, compressed; by name. They are read when they are asked for,
    which ends in OSError where that cannot be."""

    def __init__(self) -> None:
        self._read: dict[str, Callable[[], bytes]] = {}
        self._sizes: dict[str, int] = {}

    def add(self, name: str, read: Callable[[], bytes], size: int | None = None) -> None:
        """size: about how many bytes it has, where that is known without reading it."""
        self._read[name] = read
        if size is not None:
            self._sizes[name] = size

    def size(self, name: str) -> int:
        if name not in self._sizes:
            self[name] = self[name]  # whoever asks for its size will want it next
        return self._sizes[name]

    def __getitem__(self, name: str) -> bytes:
        read = self._read[name]
        try:
            return read()
        except UNREADABLE as error:
            raise OSError(f"{name}: {brief(error)}") from error

    def __setitem__(self, name: str, data: bytes) -> None:
        self.add(name, lambda: data, len(data))

    def __delitem__(self, name: str) -> None:
        del self._read[name]
        self._sizes.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


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
    edition: int = 0
    """Of steps, times and metrics: another one where they have not only become more."""

    def plain(self, known: Extent | None = None) -> dict[str, Any]:
        """known: what the page has of the run. If that is the beginning of what there is now,
        nothing of it comes again; `after` says how many of each come before."""
        steps, events, groups = known.after(self) if known else (0, 0, 0)
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "after": {"steps": steps, "events": events, "groups": groups},
            "steps": self.steps[steps:],
            "times": self.times[steps:],
            "metrics": {name: sparse(values[steps:]) for name, values in self.metrics.items()},
            "events": self.events[events:],
            "groups": [asdict(group) for group in self.groups[groups:]],
        }


@dataclass(frozen=True, slots=True)
class Extent:
    """How much there was of a run."""

    path: str
    edition: int
    steps: int
    events: Sequence[Mapping[str, Any]]
    groups: Sequence[Group]

    @staticmethod
    def of(run: RunData) -> Extent:
        return Extent(run.path, run.edition, len(run.steps), run.events, run.groups)

    def after(self, run: RunData) -> tuple[int, int, int]:
        """How many steps, events and groups of it were there; none where it is not as it was."""
        same = (self.path, self.edition) == (run.path, run.edition)
        events, groups = len(self.events), len(self.groups)
        if same and run.events[:events] == self.events and run.groups[:groups] == self.groups:
            return self.steps, events, groups
        return 0, 0, 0


def sparse(values: Sequence[float | None]) -> Sequence[float | None] | Mapping[str, Any]:
    """A metric that most steps do not have, as the values that there are and their places."""
    places = [at for at, value in enumerate(values) if value is not None]
    if len(places) >= len(values) // 4:
        return values
    return {"at": places, "values": [values[at] for at in places]}


def packed(lines: list[str]) -> bytes:
    """A chunk: lines of JSON, compressed."""
    return gzip.compress("".join(f"{line}\n" for line in lines).encode(), 6, mtime=0)


def as_json(value: Any) -> str:
    """ASCII that a browser can read: null for numbers that JSON does not know."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # seldom, and all of it has to be gone through
        return json.dumps(finite(value), allow_nan=False, separators=(",", ":"))


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in cast(dict[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in cast(Sequence[Any], value)]
    return value
