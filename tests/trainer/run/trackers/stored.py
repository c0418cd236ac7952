"""Reads back locally stored runs of the trackers."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

BLOCK, HEADER = 32768, 7
"""Block and header sizes of W&B's offline log, a LevelDB log."""


@dataclass(slots=True)
class Stored:
    """A stored run, in the order of writing."""

    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Steps and values by metric."""
    config: dict[str, Any] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    runs: set[str] = field(default_factory=set)
    end: Any = None

    def add(self, name: str, step: int, value: float) -> None:
        self.points.setdefault(name, []).append((step, value))


def environment(place: Path) -> dict[str, str]:
    """Environment in which all trackers store locally."""
    return {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_TRACKING_URI": f"file:{place / 'mlruns'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": str(place / "trackio"),
    }


def records(path: Path) -> Iterator[bytes]:
    """Records of a `.wandb` file, each in one part (1) or several (2, 3 …, 4)."""
    data, at, begun = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part, at = data[at + HEADER : at + HEADER + length], at + HEADER + length
        begun = part if kind in (1, 2) else begun + part
        if kind in (1, 4):
            yield begun


def by_wandb(folder: Path) -> Stored:
    """folder: of the run."""
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415  a second

    results = Stored()
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for content in records(path):
            record = Record.FromString(content)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                results.runs.add(record.run.run_id)
                for item in record.run.config.update:
                    results.config[item.key] = orjson.loads(item.value_json)
            elif kind == "history":
                values = {
                    item.key or ".".join(item.nested_key): orjson.loads(item.value_json)
                    for item in record.history.item
                }
                for name in values.keys() - {"_step", "_runtime", "_timestamp"}:
                    results.add(name, record.history.step.num, values[name])
            elif kind == "alert":
                results.events.append(record.alert.text)
            elif kind == "exit":
                results.end = record.exit.exit_code
    return results


def by_mlflow() -> Stored:
    from mlflow import MlflowClient  # noqa: PLC0415  a second

    results, client = Stored(), MlflowClient()
    experiment = client.get_experiment_by_name("keel")
    assert experiment is not None
    for run in client.search_runs([experiment.experiment_id]):
        results.runs.add(run.info.run_id)
        results.end = run.info.status
        results.config |= run.data.params
        tags = sorted(run.data.tags.items())
        results.config |= {k: v for k, v in tags if k.startswith("resumed.")}
        results.events += [text for name, text in tags if name.startswith("event.")]
        for name in run.data.metrics:
            for point in client.get_metric_history(run.info.run_id, name):
                results.add(name, point.step, point.value)
    return results


def by_trackio(place: Path) -> Stored:
    """place: argument of `environment`."""
    results = Stored()
    with sqlite3.connect(place / "trackio" / "keel.db") as base:
        for run, step, metrics in base.execute(
            "select run_name, step, metrics from metrics order by id"
        ):
            results.runs.add(run)
            for name, value in orjson.loads(metrics).items():
                results.add(name, step, value)
        for (text,) in base.execute("select text from alerts order by id"):
            results.events.append(text)
        for (config,) in base.execute("select config from configs"):
            results.config |= orjson.loads(config)
    return results
