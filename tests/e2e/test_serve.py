"""`keel serve`, `keel chat` and `keel judge` as a user runs them."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from openai import OpenAI

from keel.configs.schema import ColdStartConfig, TinyModelConfig
from keel.model.tiny.build import ensure_tiny_model
from keel.model.tiny.cold_start import Curriculum
from tests.rollout.judge.test_server import gone, processes_of
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e


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
