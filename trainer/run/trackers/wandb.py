"""Weights & Biases. WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and its other variables are its own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil
import wandb

from keel.trainer.run.signals import signals_blocked
from keel.trainer.run.trackers.tracker import PROJECT, End, Opened, Tracked, grouped

INIT_S, FINISH_S = 60.0, 60.0
"""Longest waits of its own for its server."""
SERVICE = "wandb-core"
"""Its process."""
QUIET = ("resume", "ledger")
"""Events that are no reason to look."""


class Wandb:
    """A run that is resumed by its id. The server takes each step once."""

    cure = "Look at WANDB_API_KEY, WANDB_BASE_URL and the network, or set WANDB_MODE=offline"

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, run: Tracked) -> Opened:
        settings = wandb.Settings(
            console="off",  # what a terminal shows is drawn over and over
            silent=True,
            init_timeout=INIT_S,
            finish_timeout=FINISH_S,
        )
        offline = wandb.setup().settings.mode == "offline"
        with signals_blocked():  # its process sends what is left when a scheduler ends the job
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
                name=os.environ.get("WANDB_NAME") or run.name,
                id=run.id or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4),
                dir=os.environ.get("WANDB_DIR") or run.folder,
                config=dict(run.knobs),
                allow_val_change=True,
                # Offline there is no server to ask; `wandb sync` joins the parts by their id.
                resume=None if offline else "allow",
                reinit="finish_previous",
                settings=settings,
            )
        here = self._run.settings.sync_dir
        where = f"offline; `wandb sync {here}` sends it" if offline else str(self._run.url)
        return Opened(id=self._run.id, where=where)

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        # Resumed, it ignores steps that it has: an evaluation that is made up for joins the next.
        at = max(step, self._run.starting_step)
        self._run.log({**grouped(numbers), "_timestamp": time}, step=at)

    def event(self, step: int, time: float, kind: str, text: str) -> None:
        level = "INFO" if kind in QUIET else "WARN"
        self._run.alert(f"{kind}, step {step}", text, level=level, wait_duration=0)

    def close(self, end: End) -> None:
        if end == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if end == "finished" else 1)

    def abandon(self) -> None:
        """At exit it would wait for its process, which tries for minutes. What that was given is in
        a file, which `wandb sync` sends."""
        with suppress(psutil.Error):
            for process in psutil.Process().children():
                if SERVICE in process.name():
                    process.kill()
