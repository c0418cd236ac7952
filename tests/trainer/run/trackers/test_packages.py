"""The three packages themselves, where no server answers and where there is no key. What they store
offline of a whole run: tests/e2e/test_command.py."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from keel.commands.cli import main
from keel.trainer.run.trackers.mlflow import allowed
from keel.trainer.run.trackers.tracker import Tracked
from keel.trainer.run.trackers.trackio import Trackio
from keel.trainer.run.trackers.wandb import Wandb
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e
KEY = "0123456789abcdefplanted00000000000000000"
RUN = """
import sys, threading, time
from pathlib import Path
from keel.trainer.run.trackers.known import check_trackers, maker
from keel.trainer.placement.ray_internals import exit_now
from keel.trainer.run.trackers.sender import TrackerThread, Trackers, has_abandoned_threads
names = ["wandb", "mlflow", "trackio"]
check_trackers(names)
say = lambda text: print(text, flush=True)
sendings = [TrackerThread(n, maker(n), Path(sys.argv[1]), {"a": 1}, say, late_s=0.0) for n in names]
trackers = Trackers(sendings, say)
longest = 0.0
while any(not sending._since for sending in sendings if not sending.done.is_set()):
    time.sleep(0.01)
for _ in range(50):
    began = time.thread_time()
    trackers.look()
    longest = max(longest, time.thread_time() - began)
    time.sleep(0.01)
trackers.close("finished", 3, seconds=1.0)
Path(sys.argv[1], "longest").write_text(str(longest))
assert has_abandoned_threads()
exit_now(0)  # as `keel.commands.train.run` does
"""


def test_a_server_that_never_answers_holds_up_neither_a_step_nor_the_end(tmp_path: Path) -> None:
    line = {"step": 3, "time": 1.0, "loss": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(100)
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        given = {
            "WANDB_API_KEY": KEY,
            "WANDB_BASE_URL": f"http://{where}",
            "WANDB_ERROR_REPORTING": "false",
            "MLFLOW_TRACKING_URI": f"http://me:{KEY}@{where}",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "TRACKIO_SERVER_URL": f"http://{where}",
            "TRACKIO_WRITE_TOKEN": KEY,
            "TRACKIO_DIR": str(tmp_path / "trackio"),
            "HOME": str(tmp_path),
        }
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(tmp_path)],
            capture_output=True,
            text=True,
            env={**os.environ, **given},
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stderr
    for name in ("wandb", "mlflow"):
        assert f"warning: {name} has not answered for 0 s. The run goes on" in done.stdout
        assert f"warning: {name} was told of 0 of 3 steps within 1 s" in done.stdout
    # In a file: a tracker's threads print into any line.
    assert float((tmp_path / "longest").read_text()) < 0.1, "a step waited"
    assert KEY not in done.stdout + done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in written if KEY.encode() in path.read_bytes()] == []


def test_without_a_key_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert main(["train", "quickstart", "run.trackers=[wandb]", f"run.dir={tmp_path / 'r'}"]) == 2
    said = capsys.readouterr().err
    assert "run.trackers: wandb: it has no key. Call `wandb login`, or set WANDB_API_KEY" in said
    assert not (tmp_path / "r").exists()


def test_wandb_has_what_is_made_up_for_at_a_step_that_it_still_takes() -> None:
    tracker, logged = Wandb(), []
    tracker._run = SimpleNamespace(starting_step=4, log=lambda of, step: logged.append((step, of)))
    tracker.log(3, 1.0, {"eval/a/score": 0.5})
    tracker.log(4, 2.0, {"loss": 2.0})
    assert logged == [
        (4, {"eval/a/score": 0.5, "_timestamp": 1.0}),
        (4, {"train/loss": 2.0, "_timestamp": 2.0}),
    ]


def test_names_are_such_as_mlflow_takes() -> None:
    assert allowed("eval/sums/pass@1") == "eval/sums/pass_at_1"
    assert allowed("data.sources[sums].size") == "data.sources.sums.size"
    assert allowed("eval/a&b/score") == "eval/a_b/score"


def test_trackio_names_its_server_and_not_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trackio.init", lambda *_, **__: None)
    monkeypatch.setenv("TRACKIO_SERVER_URL", f"http://127.0.0.1:7860/?write_token={KEY}")
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    run = Tracked(folder=tmp_path, name="a", id="a-1", knobs={})
    where = "run a-1 in project mine of http://127.0.0.1:7860/"
    assert Trackio().open(run).where == where
    monkeypatch.delenv("TRACKIO_SERVER_URL")
    assert Trackio().open(run).where == "run a-1; `trackio show --project mine`"
