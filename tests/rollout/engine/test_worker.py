"""The actor around an engine's thread, without an engine."""

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


def test_what_is_warned_of_while_an_engine_starts_comes_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    log = logging.getLogger("keel.rollout.engine.fallbacks")

    def start(*_: Any) -> None:
        for line in ("vLLM has changed", "vLLM has changed", "no copies"):
            log.warning("%s", line)
        log.info("started")
        logging.getLogger("vllm").warning("not ours")

    monkeypatch.setitem(
        sys.modules, "keel.rollout.engine.vllm_engine", SimpleNamespace(VllmEngine=0)
    )
    monkeypatch.setattr(thread, "EngineThread", start)
    started = asyncio.run(worker.RolloutWorker(engine_spec(tmp_path)).ready())
    assert started == (os.getpid(), ("vLLM has changed", "no copies"))
    log.warning("later")
    assert not [h for h in logging.getLogger("keel").handlers if isinstance(h, worker._Warnings)]
