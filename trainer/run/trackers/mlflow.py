"""MLflow. MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and its other variables are its own."""

from __future__ import annotations

import os
import re
import time as clock
from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from keel.trainer.run.trackers.tracker import PROJECT, End, Opened, Tracked, grouped

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
METRICS, PARAMS = 1000, 100
"""The most that it takes at once."""
LONGEST, TAG = 6000, 5000
"""Characters of a parameter's value, of a tag's."""


class Mlflow:
    """A run that is resumed by its id. What a parameter was at first it stays: where a resumed run
    has another value, that is a tag."""

    cure = "Look at MLFLOW_TRACKING_URI, the credentials that its server wants, and the network"

    def __init__(self) -> None:
        self._client: Any = None
        self._run = ""

    def open(self, run: Tracked) -> Opened:
        client = self._client = MlflowClient()
        known: Mapping[str, str] = {}
        if run.id:
            self._run = run.id
            client.update_run(run.id, status="RUNNING")
            known = client.get_run(run.id).data.params
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            there = client.get_experiment_by_name(name)
            experiment = there.experiment_id if there else client.create_experiment(name)
            began = round(clock.time() * 1000)
            self._run = client.create_run(experiment, began, run_name=run.name).info.run_id
        params = {allowed(knob): str(value)[:LONGEST] for knob, value in run.knobs.items()}
        changed = {k: v for k, v in params.items() if k in known and known[k] != v}
        fresh = [Param(knob, value) for knob, value in params.items() if knob not in known]
        for first in range(0, len(fresh), PARAMS):
            client.log_batch(self._run, params=fresh[first : first + PARAMS])
        for knob, value in changed.items():
            client.set_tag(self._run, f"resumed.{knob}", value[:TAG])
        return Opened(id=self._run, where=f"run {self._run} of {os.environ.get(URI, 'mlflow')}")

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        at = round(time * 1000)
        points = [Metric(allowed(name), of, at, step) for name, of in grouped(numbers).items()]
        for first in range(0, len(points), METRICS):
            self._client.log_batch(self._run, metrics=points[first : first + METRICS])

    def event(self, step: int, time: float, kind: str, text: str) -> None:
        tag = RunTag(f"event.{round(time * 1000)}.{kind}", f"step {step}: {text}"[:TAG])
        self._client.log_batch(self._run, tags=[tag])

    def close(self, end: End) -> None:
        self._client.set_terminated(self._run, STATUS[end])

    def abandon(self) -> None:
        pass


URI = "MLFLOW_TRACKING_URI"


def allowed(name: str) -> str:
    """In letters that MLflow has in names: `eval/sums/pass_at_1`, `data.sources.sums.size`."""
    name = name.replace("@", "_at_").replace("[", ".").replace("]", "")
    return re.sub(r"[^\w\-. :/]", "_", name)
