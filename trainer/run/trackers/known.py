"""Which trackers there are, and what a machine lacks for one: said before anything starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec

from keel.configs.schema import ConfigError
from keel.trainer.run.trackers.tracker import Tracker

KNOWN = {"wandb": "Wandb", "mlflow": "Mlflow", "trackio": "Trackio"}
"""Package, which also names the file here and the extra → the class."""


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError for a package that is not installed, and for W&B without a key, for which
    it would ask at the terminal."""
    for name in names:
        knob = f"run.trackers: {name}"
        if find_spec(name) is None:
            raise ConfigError(
                f"{knob}: the package is not installed. From Keel's checkout: pip install "
                f"'.[{name}]'; or take it out of run.trackers"
            )
        if name == "wandb" and not _may_send():
            raise ConfigError(
                f"{knob}: it has no key. Call `wandb login`, or set WANDB_API_KEY (in a job: pass "
                "it on); or WANDB_MODE=offline, and `wandb sync` later"
            )


def _may_send() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE", "online") != "online":
        return True
    import wandb  # noqa: PLC0415  a second, and an extra

    setup = wandb.setup().settings
    return setup.mode != "online" or wandb.login(prompt=False, verify=False)


def maker(name: str) -> Callable[[], Tracker]:
    """What makes it; its package is imported by that, which takes seconds."""
    return lambda: getattr(import_module(f"{__package__}.{name}"), KNOWN[name])()
