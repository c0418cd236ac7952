"""The quickstart through `ray job submit`, on a Ray cluster of one node started for the test."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
pytestmark = pytest.mark.e2e


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Cluster:
    """A head node with ports, temporary folder and access token of its own."""

    def __init__(self, temporary: str) -> None:
        self._port, self._dashboard = free_port(), free_port()
        self._temporary = temporary
        self._env = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        self._env.pop("RAY_ADDRESS", None)

    def run(self) -> Iterator[Cluster]:
        command = ["start", "--head", "--block", "--disable-usage-stats", "--num-cpus=2"]
        command += [f"--port={self._port}", f"--dashboard-port={self._dashboard}"]
        # Jobs are submitted through it; another cluster on this machine may have the usual one.
        command += [f"--dashboard-agent-listen-port={free_port()}"]
        command += [f"--temp-dir={self._temporary}"]
        head = subprocess.Popen(
            [BIN / "ray", *command],
            env=self._env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        try:
            yield self
        finally:
            head.terminate()  # with --block it takes its processes with it
            head.wait(timeout=60)

    def submit(self, *command: str, timeout: int = 300) -> subprocess.CompletedProcess[str]:
        address = f"http://127.0.0.1:{self._dashboard}"
        return subprocess.run(
            [BIN / "ray", "job", "submit", "--address", address, "--", *command],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="keel-", ignore_cleanup_errors=True) as temporary:
        cluster = Cluster(temporary)
        running = cluster.run()
        next(running)
        try:
            for _ in range(20):
                if cluster.submit("true", timeout=60).returncode == 0:
                    break
            else:
                raise TimeoutError("the cluster's job server did not come up")
            yield cluster
        finally:
            next(running, None)


def test_a_submitted_job_trains_on_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = cluster.submit(
        str(BIN / "keel"),
        "train",
        "quickstart",
        f"run.dir={folder}",
        "run.steps=2",
        "rollout.engines=1",
        f"model.embedded.cache_dir={tmp_path}",
        "model.embedded.cold_start.steps=10",
        "data.sources[spelling].holdout=8",
        "data.sources[spiral].holdout=8",
        "algorithm.prompts_per_step=2",
        "algorithm.group_size=4",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2" in done.stdout
    assert "held-out spelling/pass@1" in done.stdout
    steps = [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [0, 1, 2]
    assert (folder / "model" / "model.safetensors").exists()
