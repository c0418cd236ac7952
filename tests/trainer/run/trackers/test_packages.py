"""The three tracker packages: offline, with a server that does not answer, and without a key."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keel.commands.cli import main
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e
KEY = "0123456789abcdefplanted00000000000000000"
RUN = """
import sys
from pathlib import Path
from functools import partial
from keel.trainer.placement.ray_internals import exit_now
from keel.trainer.run.trackers.sender import *
names = ["wandb", "mlflow", "trackio"]
check_trackers(names)
say = partial(print, flush=True)
how = (Path(sys.argv[1]), {"data.sources[s].size": 1}, say)
threads = [TrackerThread(n, partial(make_tracker, n), *how) for n in names]
Trackers(threads, say).close("finished", 3, seconds=float(sys.argv[2]))
print("abandoned" if has_abandoned_threads() else "sent all")
exit_now(0)  # as `keel.commands.dispatch.run` does
"""


def send(folder: Path, seconds: float, **environment: str) -> str:
    """Send the metrics of two steps and return the output."""
    lines = [{"step": n, "time": 1.0 + n, "loss": 2.0, "eval/s/pass@1": 0.5} for n in (2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    event = {"step": 2, "time": 1.0, "kind": "alarm", "text": "too low"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    common = {
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HOME": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), str(seconds)],
        capture_output=True,
        text=True,
        env={**os.environ, **common, **environment},
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_every_tracker_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient  # noqa: PLC0415  (a second)

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = f"file:{tmp_path / 'mlruns'}"
    output = send(tmp_path, PATIENCE_S, WANDB_MODE="offline", MLFLOW_TRACKING_URI=store)
    assert "sent all" in output and "warning" not in output
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    client: Any = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("keel").experiment_id])
    for name, value in (("train/loss", 2.0), ("eval/s/pass_at_1", 0.5)):
        points = client.get_metric_history(run.info.run_id, name)
        assert [(point.step, point.value) for point in points] == [(2, value), (3, value)]
    assert run.data.params == {"data.sources.s.size": "1"} and run.info.status == "FINISHED"
    assert "step 2: too low" in run.data.tags.values()
    with sqlite3.connect(tmp_path / "trackio" / "keel.db") as base:
        rows = base.execute("select step, metrics from metrics order by id").fetchall()
    sent = [(step, json.loads(metrics)) for step, metrics in rows]
    assert [(step, m["train/loss"], m["eval/s/pass@1"]) for step, m in sent] == [
        (2, 2.0, 0.5),
        (3, 2.0, 0.5),
    ]


def test_silent_servers_hold_up_nothing(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(100)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        output = send(
            tmp_path,
            5.0,
            WANDB_API_KEY=KEY,
            WANDB_BASE_URL=f"http://{address}",
            MLFLOW_TRACKING_URI=f"http://me:{KEY}@{address}",
            TRACKIO_SERVER_URL=f"http://{address}",
            TRACKIO_WRITE_TOKEN=KEY,
        )
    for name in ("wandb", "mlflow"):
        assert f"warning: {name} received 0 of 3 steps" in output
    assert "abandoned" in output and KEY not in output
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in written if KEY.encode() in path.read_bytes()] == []


def test_wandb_without_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert main(["train", "quickstart", "run.trackers=[wandb]", f"run.dir={tmp_path / 'r'}"]) == 2
    assert "WANDB_API_KEY" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
