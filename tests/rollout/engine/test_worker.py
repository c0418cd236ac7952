"""Tests the Ray actor of an engine thread, without an engine."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from keel.rollout.engine import thread, worker
from tests.rollout.remote_engine import engine_spec


def test_start_returns_warnings_and_phases(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    log = logging.getLogger("keel.rollout.engine.vllm_engine")

    def start(build: Any, _: Any) -> None:
        build()
        for line in ("vLLM has changed", "vLLM has changed", "no copies"):
            log.warning("%s", line)
        log.info("started")
        logging.getLogger("vllm").warning("not ours")

    monkeypatch.setitem(
        sys.modules,
        "keel.rollout.engine.vllm_engine",
        SimpleNamespace(VllmEngine=lambda _: SimpleNamespace(compile_seconds=3.0)),
    )
    monkeypatch.setattr(thread, "EngineThread", start)
    started = asyncio.run(worker.RolloutWorker(engine_spec(tmp_path)).ready())
    assert (started.pid, started.warnings) == (os.getpid(), ("vLLM has changed", "no copies"))
    assert started.seconds["compiling"] == 3.0 and "loading libraries" in started.seconds
    log.warning("later")
    assert not [h for h in logging.getLogger("keel").handlers if isinstance(h, worker._Warnings)]
