"""Sends metrics to trackio, which is configured by TRACKIO_* variables.

trackio itself stores unsent data and retries.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trackio

from keel.trainer.run.trackers.sender import PROJECT, RunEnd


class Trackio:
    """Logs a run to trackio and resumes it by its unique name."""

    remedy = "Check TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, its token and the network"

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, folder: Path, id: str, knobs: Mapping[str, Any]) -> tuple[str, str]:
        name = id or f"{folder.name}-{secrets.token_hex(3)}"
        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        self._run = trackio.init(
            project, name, config=dict(knobs), resume="allow" if id else "never"
        )
        # Without the query of the URL, which is a write token.
        server = os.environ.get("TRACKIO_SERVER_URL", "").partition("?")[0]
        host = server or os.environ.get("TRACKIO_SPACE_ID", "")
        show = f"; `trackio show --project {project}`"
        return name, f"run {name}" + (f" in project {project} of {host}" if host else show)

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def event(self, step: int, time: float, kind: str, text: str) -> None:
        level = trackio.AlertLevel.INFO if kind == "resume" else trackio.AlertLevel.WARN
        self._run.alert(kind, text, level=level, step=step)

    def close(self, end: RunEnd) -> None:
        self._run.finish()

    def abandon(self) -> None: ...
