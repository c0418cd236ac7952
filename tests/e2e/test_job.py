"""README's commands for a Ray cluster, and `keel serve` and `keel chat` as a user runs them."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI

from keel.configs.schema import ColdStartConfig, TinyModelConfig
from keel.model.tiny.build import ensure_tiny_model
from keel.model.tiny.cold_start import Curriculum
from tests.ports import free_ports
from tests.rollout.judge.test_server import gone, processes_of
from tests.waiting import PATIENCE_S, patiently, wait_for

BIN = Path(sys.executable).parent
README = Path(__file__).parent.parent.parent / "README.md"
SMALL = (
    "run.steps=2",
    "run.trackers=[trackio]",
    "rollout.engines=1",
    "rewards.workers=1",
    "model.tiny.cold_start.steps=0",
    *(f"data.sources[{n}].{k}" for n in ("spelling", "spiral") for k in ("size=400", "holdout=8")),
    "algorithm.prompts_per_step=2",
    "algorithm.group_size=4",
)
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]  # a cluster and a run


def block_with(line: str) -> str:
    blocks = re.findall(r"^```\w*\n(.*?)^```$", README.read_text(), re.M | re.S)
    (block,) = [block for block in blocks if line in block.splitlines()]
    return block


class Shell:
    """A shell with an empty home, whose `keel` trains briefly and whose `ray` has own ports."""

    def __init__(self, place: Path, temporary: str) -> None:
        self.home, self._work = place / "home", place / "work"
        bin_ = place / "bin"
        for folder in (self.home, self._work, bin_):
            folder.mkdir()
        head, dashboard, agent, client = free_ports(4)
        real = f'exec "{BIN}'
        knobs = (*SMALL, f"model.tiny.cache_dir={place / 'models'}")
        small = " ".join(f"'{knob}'" for knob in knobs)
        ports = f"--port={head} --dashboard-port={dashboard} --num-cpus=2"
        ports += f" --dashboard-agent-listen-port={agent} --ray-client-server-port={client}"
        for name, body in {
            "keel": f'{real}/keel" "$@" {small}',
            "ray": f"""case "$1 $2" in
                "start --head") {real}/ray" "$@" {ports} --temp-dir={temporary};;
                "job submit") shift 2
                    {real}/ray" job submit --address=http://127.0.0.1:{dashboard} "$@";;
                *) {real}/ray" "$@";;
            esac""",
        }.items():
            (bin_ / name).write_text(f"#!/bin/sh\n{body}\n")
            (bin_ / name).chmod(0o755)
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self._env |= {"HOME": str(self.home), "PATH": f"{bin_}:{self._env['PATH']}"}
        self._env |= {"OMP_WAIT_POLICY": "PASSIVE", "RAY_USAGE_STATS_ENABLED": "0"}
        self._env |= {"RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600"}

    def run(self, lines: str) -> str:
        with tempfile.TemporaryFile("w+") as output:  # the cluster keeps it open
            streams: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT}
            how = {"cwd": self._work, "env": self._env, "stdin": subprocess.DEVNULL, **streams}
            done = subprocess.run(["bash", "-euc", lines], timeout=3 * PATIENCE_S, **how)
            output.seek(0)
            assert done.returncode == 0, output.read()
            return output.read()

    def steps(self, folder: str) -> list[int]:
        lines = (self._work / folder / "metrics.jsonl").read_text().splitlines()
        assert (self._work / folder / "model" / "model.safetensors").exists()
        sent = json.loads((self._work / folder / "trackers" / "trackio.json").read_text())
        assert sent["step"] == json.loads(lines[-1])["step"]
        return [json.loads(line)["step"] for line in lines]

    def stop(self) -> None:
        """Like `ray stop`, but for the processes of this home only."""

        def killed() -> list[psutil.Process]:
            actual = [process for process in psutil.process_iter() if self._owns(process)]
            for process in actual:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            return actual

        wait_for(lambda: not killed(), "the end of the cluster")

    def _owns(self, process: psutil.Process) -> bool:
        try:
            # Ray's process titles may overwrite the environment.
            actual = process.environ().get("HOME") == str(self.home)
            actual = actual or process.cwd() == str(self._work)
            return actual and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False


@contextmanager
def shell_in(place: Path) -> Iterator[Shell]:
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="keel-", ignore_cleanup_errors=True) as temporary:
        shell = Shell(place, temporary)
        try:
            yield shell
        finally:
            shell.stop()


def test_readme_commands_run_on_a_cluster(tmp_path: Path) -> None:
    with shell_in(tmp_path) as shell:
        path = shell.home / ".ray" / "auth_token"
        lines = block_with("ray start --head")
        shell.run(lines.partition("ray start")[0])
        token = path.read_text()
        assert len(token.strip()) >= 32 and stat.S_IMODE(path.stat().st_mode) == 0o600
        # Again, with the token already there.
        output = patiently(lambda: shell.run(lines), shell.stop)
        assert "succeeded" in output and "step 2/2" in output
        assert shell.steps("runs/job") == [0, 1, 2]
        assert path.read_text() == token and stat.S_IMODE(path.stat().st_mode) == 0o600


def keel(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        # A shell's background jobs ignore Ctrl-C, and so would their children.
        ["env", "--default-signal=INT", sys.executable, "-m", "keel", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_served_model_answers_and_leaves_no_process(tmp_path: Path) -> None:
    cold = ColdStartConfig(steps=0)  # random weights
    model = ensure_tiny_model(
        TinyModelConfig(cache_dir=str(tmp_path), cold_start=cold), Curriculum(seed=0)
    )
    server = keel("serve", str(model), "--port", "0", "temperature=0.5", "max_model_len=128")
    try:
        assert server.stdout and server.stderr
        url = next((w for line in server.stdout for w in line.split() if w.startswith("http")), "")
        assert url, server.stderr.read()
        with OpenAI(base_url=url, api_key="none", timeout=PATIENCE_S, max_retries=0) as client:
            (served,) = client.models.list().data
            assert served.id == model.name
            reply = client.chat.completions.create(
                model=served.id, messages=[{"role": "user", "content": "hi"}], max_tokens=4
            )
        assert reply.usage and reply.usage.completion_tokens in range(1, 5)
        chat = keel("chat", "--url", url, "--prompt", "hi")
        answer, errors = chat.communicate(timeout=PATIENCE_S)
        assert chat.returncode == 0 and answer.strip(), errors
        started = processes_of(str(model))
        assert len(started) >= 3, "the command, its guard and the server"
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=PATIENCE_S)
        assert server.returncode == 0, errors
        assert gone(started)
    finally:
        server.kill()
        server.wait(PATIENCE_S)
