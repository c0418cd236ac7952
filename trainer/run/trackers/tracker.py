"""Interface of experiment trackers, and the check that a requested one can be used."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from keel.configs.diff import flatten_config
from keel.configs.schema import Config, ConfigError

RunEnd = Literal["finished", "stopped", "failed"]
"""`stopped`: the same command resumes the run."""
PROJECT = "keel"
"""Default project, unless the environment names one."""
_CLASSES = {"wandb": "Wandb", "mlflow": "Mlflow", "trackio": "Trackio"}
"""Class of each tracker; its key names the package, the pip extra and the module here."""
QUIET = ("resume", "ledger")
"""Kinds of events that need no alert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    folder: Path
    name: str
    id: str
    """Returned by an earlier `Tracker.open`; empty for a new run."""
    knobs: Mapping[str, Any]
    """All knobs as plain data."""


class Tracker(Protocol):
    """Called from one thread, which may block; any exception is retried."""

    remedy: str
    """What to check after a failure."""

    def open(self, run: TrackedRun) -> tuple[str, str]:
        """Start or resume a run. Returns its id and where to find its curves."""
        ...

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Log metrics of a step. time: seconds since the epoch.

        Steps come in order; one repeats with more metrics if its evaluation was made later.
        """
        ...

    def event(self, step: int, time: float, kind: str, text: str) -> None:
        """Log an event (`keel.trainer.run.journal.EVENTS`)."""
        ...

    def close(self, end: RunEnd) -> None:
        """Flush."""
        ...

    def abandon(self) -> None:
        """Stop from another thread while this one hangs, so that the process can exit."""
        ...


def make_tracker(name: str) -> Tracker:
    return getattr(import_module(f"{__package__}.{name}"), _CLASSES[name])()


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a package that is not installed, and for W&B without a key."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"run.trackers: {name}: the package is not installed. Run pip install '.[{name}]' "
                "in Keel's checkout, or remove it from run.trackers"
            )
        if name == "wandb" and not _wandb_has_key():
            raise ConfigError(
                f"run.trackers: {name}: there is no API key. Run `wandb login`, set WANDB_API_KEY, "
                "or set WANDB_MODE=offline"
            )


def _wandb_has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE", "online") != "online":
        return True
    import wandb  # noqa: PLC0415  (takes a second, and is optional)

    settings = wandb.setup().settings
    return settings.mode != "online" or wandb.login(prompt=False, verify=False)


def group_names(numbers: Mapping[str, float]) -> dict[str, float]:
    """Put ungrouped metrics into the group `train`; trackers group by the part before a slash."""
    return {name if "/" in name else f"train/{name}": value for name, value in numbers.items()}


def plain_knobs(config: Config) -> dict[str, Any]:
    """Every knob that is set, as plain data. Recipes hold no keys, only names of variables."""

    def plain(value: Any) -> Any:
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)

    flat = flatten_config(config)
    return {knob: json.loads(json.dumps(value, default=plain)) for knob, value in flat.items()}


def without_secrets(text: str) -> str:
    """Remove keys from the environment and passwords in URLs."""
    for name, value in os.environ.items():
        if re.search(r"KEY|TOKEN|SECRET|PASSWORD", name) and len(value) >= 8:
            text = text.replace(value, "…")
    return re.sub(r"//[^/@\s]+@", "//…@", text)
