"""The three packages without a server or a key (offline: tests/e2e/test_command.py)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from keel.commands.cli import main
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e
KEY = "0123456789abcdefplanted00000000000000000"
RUN = """
import sys, threading, time
from pathlib import Path
from functools import partial
from keel.trainer.run.trackers.tracker import check_trackers, make_tracker
from keel.trainer.placement.ray_internals import exit_now
from keel.trainer.run.trackers.sender import TrackerThread, Trackers, has_abandoned_threads
names = ["wandb", "mlflow", "trackio"]
check_trackers(names)
say = lambda text: print(text, flush=True)
how = (Path(sys.argv[1]), {"a": 1}, say)
threads = [TrackerThread(n, partial(make_tracker, n), *how, hang_s=0.0) for n in names]
trackers = Trackers(threads, say)
longest = 0.0
while any(not thread._busy_since for thread in threads if not thread.done.is_set()):
    time.sleep(0.01)
for _ in range(50):
    began = time.thread_time()
    trackers.wake()
    longest = max(longest, time.thread_time() - began)
    time.sleep(0.01)
trackers.close("finished", 3, seconds=1.0)
Path(sys.argv[1], "longest").write_text(str(longest))
assert has_abandoned_threads()
exit_now(0)  # as `keel.commands.dispatch.run` does
"""


def test_silent_servers_hold_up_nothing(tmp_path: Path) -> None:
    line = {"step": 3, "time": 1.0, "loss": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(100)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        environment = {
            "WANDB_API_KEY": KEY,
            "WANDB_BASE_URL": f"http://{address}",
            "WANDB_ERROR_REPORTING": "false",
            "MLFLOW_TRACKING_URI": f"http://me:{KEY}@{address}",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "TRACKIO_SERVER_URL": f"http://{address}",
            "TRACKIO_WRITE_TOKEN": KEY,
            "TRACKIO_DIR": str(tmp_path / "trackio"),
            "HOME": str(tmp_path),
        }
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(tmp_path)],
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stderr
    for name in ("wandb", "mlflow"):
        assert f"warning: {name} has not answered" in done.stdout
        assert f"warning: {name} received 0 of 3 steps" in done.stdout
    assert float((tmp_path / "longest").read_text()) < 0.1, "a step waited"
    assert KEY not in done.stdout + done.stderr
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
