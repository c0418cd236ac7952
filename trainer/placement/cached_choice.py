"""What Keel has chosen for a run, in its folder: a run that goes on has the same layout, unless the
hardware is another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.configs.schema import Config
from keel.trainer.run import checkpoint

CHOSEN = "chosen.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedChoice:
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Knob → what was chosen when the run began, where that still holds."""
    changed: str = ""
    """How the hardware is another than then."""


def load_choice(config: Config, now: Mapping[str, Any]) -> SavedChoice:
    """Of the run in `run.dir` that this one would go on with. now: what the hardware is like."""
    folder = Path(config.run.dir).expanduser()
    latest = checkpoint.latest(folder / "checkpoints")
    try:
        saved = json.loads((folder / CHOSEN).read_text())
        values, then = dict(saved["values"]), dict(saved["hardware"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or not one of ours
        return SavedChoice()
    if latest is None or config.run.resume == "never":
        return SavedChoice()
    differences = [
        f"{what} {then.get(what)} → {now[what]}" for what in now if then.get(what) != now[what]
    ]
    if not differences:
        return SavedChoice(values=values)
    said = f"the hardware is not what it was ({', '.join(differences)}): the layout is chosen anew"
    return SavedChoice(changed=said)


def save_choice(folder: Path, values: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Whole or not at all; where nothing was left open, nothing. now: as of `remembered`."""
    if not values:
        return
    fresh = folder / f"{CHOSEN}.tmp"
    content = {"values": dict(values), "hardware": dict(now)}
    fresh.write_text(json.dumps(content, indent=1) + "\n")
    fresh.replace(folder / CHOSEN)


def update_choice(folder: Path, values: Mapping[str, Any]) -> None:
    """Put others in the place of values that were chosen, for when the run goes on."""
    try:
        saved = json.loads((folder / CHOSEN).read_text())
        saved["values"].update({k: v for k, v in values.items() if k in saved["values"]})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    fresh = folder / f"{CHOSEN}.tmp"
    fresh.write_text(json.dumps(saved, indent=1) + "\n")
    fresh.replace(folder / CHOSEN)
