"""What a tracker is: how Keel speaks to Weights & Biases, MLflow and trackio."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from keel.configs.diff import flatten_config
from keel.configs.schema import Config

End = Literal["finished", "stopped", "failed"]
"""stopped: the same command goes on with the run."""
PROJECT = "keel"
"""Where the environment names no other."""
BARE = "train"
"""The group of metrics whose names have none: all three group by what stands before a slash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """A run, as a tracker is told of it."""

    folder: Path
    name: str
    """Of the run folder."""
    id: str
    """By which the tracker knows it; empty where it has not heard of it before."""
    knobs: Mapping[str, Any]
    """All of them, in plain data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    id: str
    """To be given to `open` when the run is resumed."""
    where: str
    """For people: where its curves are."""


class Tracker(Protocol):
    """Called from one thread. It may take its time, and raise whatever it wants."""

    cure: str
    """What to look at when it fails."""

    def open(self, run: Tracked) -> Opened:
        """Begin the run, or go on with the one of this id."""
        ...

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """A step's metrics, by their names in `metrics.jsonl`. time: seconds since the epoch. Steps
        come in order; one comes again, with further names, where its evaluation was made up for,
        which may be after `open` has resumed the run."""
        ...

    def event(self, step: int, time: float, kind: str, text: str) -> None:
        """What happened besides (`keel.trainer.run.journal.EVENTS`)."""
        ...

    def close(self, end: End) -> None:
        """Send what is not sent yet."""
        ...

    def abandon(self) -> None:
        """From another thread, while this one hangs: nothing of it may keep the command from its
        end. Returns at once."""
        ...


def grouped(numbers: Mapping[str, float]) -> dict[str, float]:
    """By the names that trackers have them under."""
    return {name if "/" in name else f"{BARE}/{name}": of for name, of in numbers.items()}


def knobs_of(config: Config) -> dict[str, Any]:
    """Every knob that is set, in plain data. (None has a key: recipes hold names of variables.)"""

    def plain(value: Any) -> Any:
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)

    flat = flatten_config(config)
    return {knob: json.loads(json.dumps(value, default=plain)) for knob, value in flat.items()}


def without_keys(text: str) -> str:
    """A message of a package's without the keys that the environment holds, and without passwords
    of addresses."""
    for name, value in os.environ.items():
        if re.search(r"KEY|TOKEN|SECRET|PASSWORD", name) and len(value) >= 8:
            text = text.replace(value, "…")
    return re.sub(r"//[^/@\s]+@", "//…@", text)
