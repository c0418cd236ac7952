"""Sends metrics to MLflow, which is configured with MLFLOW_* variables."""

from __future__ import annotations

import os
import re
import time as clock
from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from keel.trainer.run.trackers.tracker import PROJECT, RunEnd, TrackedRun, group_names

_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MAX_METRICS, _MAX_PARAMS = 1000, 100
"""Maximum number of metrics and parameters that the server accepts in one request."""
_PARAM_CHARACTERS, _TAG_CHARACTERS = 6000, 5000


class Mlflow:
    """Tracks a run with MLflow, and resumes it by its id. MLflow parameters cannot change, so
    changed knobs become tags."""

    remedy = "Check MLFLOW_TRACKING_URI, the server's credentials and the network"

    def __init__(self) -> None:
        self._client: Any = None
        self._run = ""

    def open(self, run: TrackedRun) -> tuple[str, str]:
        client = self._client = MlflowClient()
        saved: Mapping[str, str] = {}
        if run.id:
            self._run = run.id
            client.update_run(run.id, status="RUNNING")
            saved = client.get_run(run.id).data.params
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            existing = client.get_experiment_by_name(name)
            experiment = existing.experiment_id if existing else client.create_experiment(name)
            began = round(clock.time() * 1000)
            self._run = client.create_run(experiment, began, run_name=run.name).info.run_id
        params = {allowed_name(k): str(v)[:_PARAM_CHARACTERS] for k, v in run.knobs.items()}
        changed = {k: v for k, v in params.items() if k in saved and saved[k] != v}
        fresh = [Param(knob, value) for knob, value in params.items() if knob not in saved]
        for first in range(0, len(fresh), _MAX_PARAMS):
            client.log_batch(self._run, params=fresh[first : first + _MAX_PARAMS])
        for knob, value in changed.items():
            client.set_tag(self._run, f"resumed.{knob}", value[:_TAG_CHARACTERS])
        server = os.environ.get("MLFLOW_TRACKING_URI", "mlflow")
        return self._run, f"run {self._run} of {server}"

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        at = round(time * 1000)
        grouped = group_names(numbers)
        points = [Metric(allowed_name(name), value, at, step) for name, value in grouped.items()]
        for first in range(0, len(points), _MAX_METRICS):
            self._client.log_batch(self._run, metrics=points[first : first + _MAX_METRICS])

    def event(self, step: int, time: float, kind: str, text: str) -> None:
        value = f"step {step}: {text}"[:_TAG_CHARACTERS]
        tag = RunTag(f"event.{round(time * 1000)}.{kind}", value)
        self._client.log_batch(self._run, tags=[tag])

    def close(self, end: RunEnd) -> None:
        self._client.set_terminated(self._run, _STATUS[end])

    def abandon(self) -> None:
        pass


def allowed_name(name: str) -> str:
    """Replace the characters that MLflow forbids, such as in `eval/sums/pass_at_1` and
    `data.sources.sums.size`."""
    name = name.replace("@", "_at_").replace("[", ".").replace("]", "")
    return re.sub(r"[^\w\-. :/]", "_", name)
