"""Trackers receive everything exactly once and never delay a run."""

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from keel.commands import exit_status as commands
from keel.configs.schema import AlarmsConfig
from keel.rl.metrics import Mean
from keel.trainer.run.journal import CostRates, Journal, note
from keel.trainer.run.trackers import (
    _EVENT,
    _close_threads,
    _RunEnd,
    _TrackerThread,
    has_abandoned_threads,
)
from keel.trainer.run.view import View
from tests.waiting import PATIENCE_S, wait_for


class FakeTracker:
    """A tracker that fails while `broken` is set, and hangs until `released` is set."""

    remedy = "Plug it in"

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.events: list[str] = []
        self.ids: list[str] = []
        self.ends: list[_RunEnd] = []
        self.broken, self.released = "", threading.Event()
        self.released.set()

    def open(self, folder: Path, id: str, knobs: Mapping[str, object]) -> tuple[str, str]:
        self._called()
        self.ids.append(id)
        return id or "new", "https://me:hunter2@there/run"

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        self._called()
        self.steps.append((step, dict(numbers)))

    def event(self, step: int, time: float, kind: str, text: str) -> None:
        self._called()
        self.events.append(text)

    def close(self, end: _RunEnd) -> None:
        self._called()
        self.ends.append(end)

    def _called(self) -> None:
        assert self.released.wait(PATIENCE_S)
        if self.broken:
            raise RuntimeError(self.broken)


class Run:
    """A run whose record grows, and its tracker."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tracker = folder, FakeTracker()
        self.lines: list[str] = []

    def write(self, *steps: int, name: str = "a") -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            for step in steps:
                file.write(json.dumps({"step": step, "time": 1.0, f"reward/{name}": step}) + "\n")

    def start(self, **options: float) -> _TrackerThread:
        say, options = self.lines.append, {"retry_s": 0.0, "hang_s": 1e9, **options}
        return _TrackerThread("fake", lambda: self.tracker, self.folder, {}, say, **options)

    def close(self, thread: _TrackerThread, end: _RunEnd, step: int, seconds: float = 60.0) -> None:
        _close_threads([thread], end, step, self.lines.append, seconds)

    @property
    def sent(self) -> list[int]:
        return [step for step, _ in self.tracker.steps]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_resumed_run_sends_nothing_twice(run: Run) -> None:
    run.write(0, 1, 2, 3)
    note(run.folder, 1, "alarm", "first")
    thread = run.start()
    run.close(thread, "stopped", 3)
    # Resumed from a checkpoint of step 1: later lines are dropped and written again.
    (run.folder / "metrics.jsonl").write_text("")
    run.write(0, 1)
    note(run.folder, 1, "resume", "second")
    note(run.folder, 1, _EVENT, "not sent")
    thread = run.start()
    run.write(2, 3, 4, 5, name="b")
    thread.wake()
    run.close(thread, "finished", 5)
    assert run.sent == [0, 1, 2, 3, 4, 5]
    assert run.tracker.steps[3:5] == [(3, {"reward/a": 3}), (4, {"reward/b": 4})]
    assert run.tracker.events == ["first", "second"]
    assert run.tracker.ids == ["", "new"]
    assert run.tracker.ends == ["stopped", "finished"]
    assert run.lines == ["fake: https://…@there/run"] * 2


def test_evaluation_made_after_a_resume_is_sent_once(run: Run) -> None:
    run.write(0, 1)
    run.close(run.start(), "stopped", 1)
    rates, alarms = CostRates(8, 6e9, 2e9), AlarmsConfig()
    options: dict[str, Any] = {"trajectories": 0, "costs": rates, "alarms": alarms}
    journal = Journal(run.folder, View(2), resumed_at=1, **options)
    thread = run.start()
    journal.record(1, {"eval/sums/pass@1": Mean(1.0, 2)}, [])
    journal.close()
    run.close(thread, "stopped", 1)
    run.close(run.start(), "finished", 1)
    assert run.tracker.steps[2:] == [(1, {"eval/sums/pass@1": 0.5})]


def test_failure_is_printed_once_and_caught_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "0123456789abcdef")
    run.tracker.broken = "401: 0123456789abcdef is no key of https://me:hunter2@there"
    run.write(0, 1)
    thread = run.start()
    for _ in range(3):
        wait_for(lambda: not thread._wake.is_set())
        thread.wake()
    (line,) = wait_for(lambda: run.lines)
    assert "RuntimeError: 401: … is no key of https://…@there" in line and "Plug it in" in line
    run.tracker.broken = ""
    run.write(2)
    thread.wake()
    wait_for(lambda: run.sent == [0, 1, 2])
    run.close(thread, "finished", 2)
    assert len(run.lines) == 3


def test_hanging_tracker_is_abandoned(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(commands, "exit_now", statuses.append)
    check = argparse.Namespace(command="check")
    assert commands.exit_status(check, lambda: None) == 0 and not statuses
    run.tracker.released.clear()
    run.write(0, 1)
    thread = run.start(hang_s=0.0)
    wait_for(lambda: thread._busy_since)
    thread.wake()
    thread.wake()
    assert len(run.lines) == 1
    run.close(thread, "finished", 1, seconds=0.1)
    assert "0 of 1 steps" in run.lines[1]
    commands.exit_status(check, lambda: None)
    assert statuses == [0]
    run.tracker.released.set()
    assert thread.done.wait(PATIENCE_S)
    assert run.sent == [0, 1] and len(run.lines) == 2
    wait_for(lambda: not has_abandoned_threads())


RUN = """
import sys
from pathlib import Path
from functools import partial
from keel.trainer.placement.ray_internals import exit_now
from keel.trainer.run.trackers import _close_threads, _TrackerThread, _TRACKERS
from keel.trainer.run.trackers import check_trackers, has_abandoned_threads
names = ["wandb", "mlflow", "trackio"]
check_trackers(names)
say = partial(print, flush=True)
how = (Path(sys.argv[1]), {"data.sources[s].size": 1}, say)
threads = [_TrackerThread(n, partial(_TRACKERS[n], n), *how) for n in names]
_close_threads(threads, "finished", 3, say, float(sys.argv[2]))
print("abandoned" if has_abandoned_threads() else "sent all")
exit_now(0)  # as `keel.commands.exit_status` does
"""


@pytest.mark.e2e
def test_every_tracker_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient  # noqa: PLC0415  (a second)

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = f"file:{tmp_path / 'mlruns'}"
    lines = [{"step": n, "time": 1.0 + n, "loss": 2.0, "eval/s/pass@1": 0.5} for n in (2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    note(tmp_path, 2, "alarm", "too low")
    environment = {
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_MODE": "offline",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_TRACKING_URI": store,
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), str(PATIENCE_S)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
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
