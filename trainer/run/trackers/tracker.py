"""Defines the interface of experiment trackers, and checks that the requested ones can be used."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from keel.configs.diff import flatten_config
from keel.configs.schema import Config, ConfigError

RunEnd = Literal["finished", "stopped", "failed"]
"""How a run ended. A run that is `stopped` can be resumed with the same command."""
PROJECT = "keel"
"""Default project name. Environment variables can override it."""
_CLASSES = {"wandb": "Wandb", "mlflow": "Mlflow", "trackio": "Trackio"}
"""The class of each tracker. The key is the name of its package, its pip extra and its module in
this folder."""


class Tracker(Protocol):
    """Sends the metrics and events of a run to an experiment tracker.

    All methods except `abandon` are called from one thread and may block. If a call raises an
    exception, it is repeated.
    """

    remedy: str
    """What the user can do after a failure."""

    def open(self, folder: Path, id: str, knobs: Mapping[str, Any]) -> tuple[str, str]:
        """Start a run, or resume the run with this `id` if it is not empty.

        Returns the id, and the place where the run's curves can be viewed.
        """
        ...

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Log the metrics of a step. `time` is in seconds since the epoch.

        Steps arrive in order. If an evaluation was made later, its step is logged a second time.
        """
        ...

    def event(self, step: int, time: float, kind: str, text: str) -> None: ...

    def close(self, end: RunEnd) -> None:
        """Send everything that is still in a buffer."""
        ...

    def abandon(self) -> None:
        """Stop a tracker whose thread hangs, so that the process can exit."""
        ...


def make_tracker(name: str) -> Tracker:
    return getattr(import_module(f"{__package__}.{name}"), _CLASSES[name])()


def check_trackers(names: Sequence[str]) -> None:
    """Check that the requested trackers can be used.

    Raises ConfigError if a package is not installed or W&B has no API key.
    """
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


def plain_knobs(config: Config) -> dict[str, Any]:
    """Return all knobs that are set, as JSON values.

    They are safe to upload: recipes contain no keys, only the names of environment variables.
    """

    def plain(value: Any) -> Any:
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)

    flat = flatten_config(config)
    return {knob: json.loads(json.dumps(value, default=plain)) for knob, value in flat.items()}


def without_secrets(text: str) -> str:
    """Remove the values of secret environment variables, and passwords in URLs, from a text."""
    for name, value in os.environ.items():
        if re.search(r"KEY|TOKEN|SECRET|PASSWORD", name) and len(value) >= 8:
            text = text.replace(value, "…")
    return re.sub(r"//[^/@\s]+@", "//…@", text)
