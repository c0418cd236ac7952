"""Training run that can be restarted, and its processes by role."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from keel.commands.cli import REFUSED

ROLES = {
    "engine": "ray::RolloutWorker",
    "rank": "ray::TrainerWorker",
    "reward worker": "keel.rewards.worker",
    "raylet": "/raylet",
    "gcs": "gcs_server",
}
"""Role → substring of the command line."""
MARK = "KEEL_CHAOS_RUN"
"""Environment variable with the run folder, set for all processes of a run."""
TIMEOUT_S = 1800.0


class Refused(RuntimeError):
    """The command was refused, so a restart cannot help."""


class Run:
    """Driver process and all processes that it starts."""

    def __init__(
        self,
        folder: Path,
        knobs: Sequence[str],
        steps: int,
        log: Path,
        *,
        environment: Mapping[str, str],
    ) -> None:
        self.folder = folder
        self._command = [sys.executable, "-m", "keel.commands.cli", "train", *knobs]
        self._command += [f"run.dir={folder}", f"run.steps={steps}"]
        self._environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
        self._environment[MARK] = str(folder)
        self._log, self.starts = log, 0
        self._lines: set[str] = set()
        self.start()

    def start(self) -> None:
        """Start the command; raises `Refused` if the previous start was refused."""
        if self.starts and self.process.returncode == REFUSED:
            raise Refused(f"the run ended with status {REFUSED}: {self.messages(0)[-3:]}")
        self.starts += 1
        with self._log.open("a") as log:
            self.process = psutil.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment,
            )

    def ended(self) -> bool:
        return self.process.poll() is not None

    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._written()]

    def last(self) -> int:
        """Return the latest step."""
        lines = self._written()
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def fresh(self) -> int:
        """Count the steps written since the last call, including repeated steps.

        Compares lines instead of times, because the clock may jump.
        """
        lines = set(self._written())
        count, self._lines = len(lines - self._lines), self._lines | lines
        return count

    def messages(self, since: int) -> list[str]:
        """Return the output lines after byte `since`, without step lines."""
        text = self._log.read_bytes()[since:].decode(errors="replace")
        return [line for line in text.splitlines() if line and not line.startswith("step ")]

    def position(self) -> int:
        return self._log.stat().st_size

    def of(self, role: str) -> list[psutil.Process]:
        if role == "driver":
            return [self.process]
        with suppress(psutil.Error):
            below = self.process.children(recursive=True)
            return [one for one in below if ROLES[role] in words_of(one)]
        return []

    def _written(self) -> list[str]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [line for line in lines if line.endswith("\n")]


def marked(folder: Path) -> list[psutil.Process]:
    """List the processes started by the run in `folder`."""
    processes: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == str(folder):
                processes.append(process)
    return processes


def words_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def until(ready: Callable[[], Any], what: str) -> None:
    """Poll until `ready()`; the TimeoutError names `what`."""
    end = time.monotonic() + TIMEOUT_S
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {TIMEOUT_S:g} s for {what}")
        time.sleep(0.05)
