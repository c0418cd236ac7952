"""Tests the judge server's options, log excerpt and restart limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import JudgeConfig, JudgeServerConfig
from keel.rollout.judge import server
from keel.rollout.judge.process import environment, flags, log_excerpt, options
from keel.rollout.judge.server import MAX_RESTARTS, RECENT_S, JudgeServer

SERVER = JudgeServerConfig(
    tensor_parallel=2,
    max_model_len=4096,
    options={"quantization": "fp8", "enforce-eager": False, "hf_overrides": {"a": [1]}},
)
CONFIG = JudgeConfig(model="a/judge", serve=True, max_concurrent=7, server=SERVER)


def arguments(*, gpu: bool) -> list[str]:
    return " ".join(flags(options(CONFIG, gpu=gpu))).removeprefix("--").split(" --")


def test_knobs_become_vllm_options() -> None:
    given = arguments(gpu=True)
    for wanted in (
        "model a/judge",
        "served-model-name a/judge",
        "max-num-seqs 7",
        "max-model-len 4096",
        "tensor-parallel-size 2",
        "gpu-memory-utilization 0.85",
        'structured-outputs-config {"backend": "xgrammar", "disable_any_whitespace": true}',
        "quantization fp8",
        "no-enforce-eager",
        'hf-overrides {"a": [1]}',
    ):
        assert wanted in given
    assert "kv-cache-memory-bytes 536870912" in arguments(gpu=False)


def test_cpu_server_threads() -> None:
    assert environment(gpu=False, threads=3)["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in environment(gpu=True, threads=3)


def test_log_excerpt_starts_with_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_excerpt(log) == ""
    log.write_text(
        "(API pid=1) WARNING 11-21 11:25:05 [a.py:2] This can cause OSError: [Errno 24]\n"
        "(EngineCore pid=2) ERROR 11-21 11:25:40 [core.py:1510] ValueError: no room\n"
        + "  a line of a traceback\n" * 40
        + "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    lines = log_excerpt(log).splitlines()
    assert lines[0] == "first error: ValueError: no room"
    assert lines[1] == f"last lines of its log ({log}):"
    assert lines[-1].startswith("RuntimeError: Engine core")
    assert len(lines) < 20


def test_only_recent_restarts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, actor = [0.0], object()

    def launch(self: Any) -> None:
        self._actor = actor

    monkeypatch.setattr(server.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(server.ray_timeouts, "kill", lambda _: None)
    monkeypatch.setattr(JudgeServer, "_launch", launch)
    monkeypatch.setattr(JudgeServer, "_wait", lambda _: "http://somewhere")
    monkeypatch.setattr(JudgeServer, "_ended", lambda _: "it died")
    judge = JudgeServer(JudgeConfig(model="m", serve=True), gpu=False)
    for _ in range(3 * MAX_RESTARTS):
        assert judge.url() == "http://somewhere"
        now[0] += RECENT_S / MAX_RESTARTS + 1
    assert judge.restarts == 3 * MAX_RESTARTS - 1
    with pytest.raises(RuntimeError, match=f"{MAX_RESTARTS + 1} times"):
        for _ in range(MAX_RESTARTS + 1):
            judge.url()
