"""trackio. TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL and its other variables are its own.

It raises nothing: what it cannot send it keeps, and says so itself.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

import trackio

from keel.trainer.run.trackers.tracker import PROJECT, End, Opened, Tracked, grouped

QUIET = ("resume", "ledger")
"""Events that are no reason to look."""


class Trackio:
    """A run that is resumed by its name, which is no other's."""

    cure = "Look at TRACKIO_DIR, or at TRACKIO_SPACE_ID or _SERVER_URL, its token and the network"

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, run: Tracked) -> Opened:
        name = run.id or f"{run.name}-{secrets.token_hex(3)}"
        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        self._run = trackio.init(
            project, name, config=dict(run.knobs), resume="allow" if run.id else "never"
        )
        # Without what follows the address: a token that lets anybody write there.
        server = os.environ.get("TRACKIO_SERVER_URL", "").partition("?")[0]
        there = server or os.environ.get("TRACKIO_SPACE_ID", "")
        seen = (
            f" in project {project} of {there}"
            if there
            else f"; `trackio show --project {project}`"
        )
        return Opened(id=name, where=f"run {name}{seen}")

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        self._run.log(grouped(numbers), step=step)

    def event(self, step: int, time: float, kind: str, text: str) -> None:
        level = trackio.AlertLevel.INFO if kind in QUIET else trackio.AlertLevel.WARN
        self._run.alert(kind, text, level=level, step=step)

    def close(self, end: End) -> None:
        self._run.finish()

    def abandon(self) -> None:
        pass
