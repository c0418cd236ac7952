"""Sends metrics to MLflow, which is configured by MLFLOW_* variables."""

from __future__ import annotations

import os
import re
import time as clock
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from keel.trainer.run.trackers.sender import PROJECT, RunEnd

_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MAX_PARAMS, _PARAM_CHARACTERS, _TAG_CHARACTERS = 100, 6000, 5000
"""The server's limits on parameters per request, and on characters per parameter and per tag."""


class Mlflow:
    """Logs a run to MLflow and resumes it by its id. The parameters stay the same as at the first
    start, because MLflow cannot change them."""

    remedy = "Check MLFLOW_TRACKING_URI, the server's credentials and the network"

    def __init__(self) -> None:
        self._client: Any = None
        self._run = ""

    def open(self, folder: Path, id: str, knobs: Mapping[str, Any]) -> tuple[str, str]:
        client = self._client = MlflowClient()
        if id:
            self._run = id
            client.update_run(id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            existing = client.get_experiment_by_name(name)
            experiment = existing.experiment_id if existing else client.create_experiment(name)
            began = round(clock.time() * 1000)
            self._run = client.create_run(experiment, began, run_name=folder.name).info.run_id
            params = [
                Param(_allowed(knob), str(value)[:_PARAM_CHARACTERS])
                for knob, value in knobs.items()
            ]
            for first in range(0, len(params), _MAX_PARAMS):
                client.log_batch(self._run, params=params[first : first + _MAX_PARAMS])
        return self._run, f"run {self._run} of {os.environ.get('MLFLOW_TRACKING_URI', 'mlflow')}"

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        at = round(time * 1000)
        points = [Metric(_allowed(name), value, at, step) for name, value in numbers.items()]
        self._client.log_batch(self._run, metrics=points)

    def event(self, step: int, time: float, kind: str, text: str) -> None:
        value = f"step {step}: {text}"[:_TAG_CHARACTERS]
        self._client.log_batch(
            self._run, tags=[RunTag(f"event.{round(time * 1000)}.{kind}", value)]
        )

    def close(self, end: RunEnd) -> None:
        self._client.set_terminated(self._run, _STATUS[end])

    def abandon(self) -> None: ...


def _allowed(name: str) -> str:
    """Replace characters that MLflow forbids in names. The result looks like `eval/sums/pass_at_1`
    or `data.sources.sums.size`."""
    name = name.replace("@", "_at_").replace("[", ".").replace("]", "")
    return re.sub(r"[^\w\-. :/]", "_", name)
