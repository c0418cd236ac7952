"""One run, started as often as it ends, and its processes by what they are for."""

from __future__ import annotations

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

from benchmarks.chaos.second_node import Cluster
from keel.model.ray_calls import NAME
from keel.trainer.cli import REFUSED

ROLES = {
    "engine": "ray::RolloutWorker",
    "rank": "ray::TrainerWorker",
    "reward worker": "keel.rewards.workers.worker",
    "raylet": "/raylet",
    "gcs": "gcs_server",
}
"""Role of a process → what stands in its command line."""
MARK = "KEEL_CHAOS_RUN"
"""Environment variable of all that belongs to a run, with its folder."""
DEADLINE_S = 1800.0


class Refused(RuntimeError):
    """The run's command cannot be run, and no other start of it will be."""


class Run:
    """Driver, and all that belongs to it."""

    def __init__(
        self,
        folder: Path,
        knobs: Sequence[str],
        steps: int,
        log: Path,
        *,
        environment: Mapping[str, str],
        cluster: Cluster | None = None,
    ) -> None:
        """cluster: that it joins; None: it starts one of its own."""
        self.folder, self.cluster = folder, cluster
        self._command = [sys.executable, "-m", "keel.trainer.cli", "train", *knobs]
        self._command += [f"run.dir={folder}", f"run.steps={steps}"]
        self._environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
        self._environment[MARK] = str(folder)
        if cluster:
            self._environment |= cluster.environment
        self._log, self.starts = log, 0
        self._lines: set[str] = set()
        self.start()

    def start(self) -> None:
        """Raises `Refused` where the last start was."""
        if self.starts and self.process.returncode == REFUSED:
            raise Refused(f"the run ended with status {REFUSED}: {self.said(0)[-3:]}")
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
        """The newest step."""
        lines = self._written()
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def fresh(self) -> int:
        """Steps written since this was last asked; those that a restart has taken back and trained
        again are new. By what is in the lines: their times are those of a clock that may jump."""
        lines = set(self._written())
        found, self._lines = len(lines - self._lines), self._lines | lines
        return found

    def said(self, since: int) -> list[str]:
        """Lines of its output that are no step's."""
        text = self._log.read_bytes()[since:].decode(errors="replace")
        return [line for line in text.splitlines() if line and not line.startswith("step ")]

    def position(self) -> int:
        return self._log.stat().st_size

    def all(self) -> list[psutil.Process]:
        """Driver first, and what is below it, and on the nodes of its cluster."""
        with suppress(psutil.Error):
            found = [self.process, *self.process.children(recursive=True)]
            if self.cluster:
                found += [*self.cluster.on_first(), *self.cluster.on_second()]
            return list(dict.fromkeys(found))
        return []

    def own(self) -> list[psutil.Process]:
        """What must not outlive it, whoever is its parent by now: of a cluster that it has joined,
        its actors alone."""
        joined = [one for one in self.all() if actor(one)] if self.cluster else []
        return list(dict.fromkeys([*marked(self.folder), *joined]))

    def own_on_second(self) -> list[psutil.Process]:
        return [one for one in self.cluster.on_second() if actor(one)] if self.cluster else []

    def of(self, role: str) -> list[psutil.Process]:
        if role == "driver":
            return [self.process]
        there = [one for one in self.all() if ROLES[role] in words_of(one)]
        # Without its first node the cluster is no more, and no start of the run brings it back.
        away = self.cluster.on_second() if self.cluster and role in ("raylet", "gcs") else there
        return [one for one in there if one in away]

    def _written(self) -> list[str]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [line for line in lines if line.endswith("\n")]


def actor(process: psutil.Process) -> bool:
    with suppress(psutil.Error, OSError):
        return NAME in process.environ()
    return False


def marked(folder: Path) -> list[psutil.Process]:
    """What belongs to the run in `folder`, or has."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == str(folder):
                found.append(process)
    return found


def words_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def until(ready: Callable[[], Any], what: str) -> None:
    """Raises TimeoutError naming `what`."""
    end = time.monotonic() + DEADLINE_S
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {DEADLINE_S:g} s for {what}")
        time.sleep(0.05)
