"""Sends metrics to Weights & Biases, which is configured by WANDB_* variables."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import wandb

from keel.trainer.run.signals import signals_blocked
from keel.trainer.run.trackers.sender import PROJECT, RunEnd

_SERVER_TIMEOUT_S = 60.0
_PROCESS = "wandb-core"


class Wandb:
    """Logs a run to Weights & Biases and resumes it by its id. The server accepts each step only
    once."""

    remedy = "Check WANDB_API_KEY, WANDB_BASE_URL and the network, or set WANDB_MODE=offline"

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, folder: Path, id: str, knobs: Mapping[str, Any]) -> tuple[str, str]:
        settings = wandb.Settings(
            console="off",  # would record every redraw of the panel
            silent=True,
            init_timeout=_SERVER_TIMEOUT_S,
            finish_timeout=_SERVER_TIMEOUT_S,
        )
        offline = wandb.setup().settings.mode == "offline"
        with signals_blocked():  # its process sends the rest when a scheduler ends the job
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
                name=os.environ.get("WANDB_NAME") or folder.name,
                id=id or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4),
                dir=os.environ.get("WANDB_DIR") or folder,
                config=dict(knobs),
                allow_val_change=True,
                # Offline there is no server to ask; `wandb sync` joins the parts by their id.
                resume=None if offline else "allow",
                reinit="finish_previous",
                settings=settings,
            )
        sync = f"offline; `wandb sync {self._run.settings.sync_dir}` sends it"
        return self._run.id, sync if offline else str(self._run.url)

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        # A resumed run ignores steps that the server has, so a late evaluation joins the next one.
        at = max(step, self._run.starting_step)
        self._run.log({**numbers, "_timestamp": time}, step=at)

    def event(self, step: int, time: float, kind: str, text: str) -> None:
        level = "INFO" if kind == "resume" else "WARN"
        self._run.alert(f"{kind}, step {step}", text, level=level, wait_duration=0)

    def close(self, end: RunEnd) -> None:
        if end == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if end == "finished" else 1)

    def abandon(self) -> None:
        """Kill the W&B process. Otherwise the interpreter would wait minutes for it at exit. `wandb
        sync` can upload the data that the process had received."""
        with suppress(psutil.Error):
            for process in psutil.Process().children():
                if _PROCESS in process.name():
                    process.kill()
