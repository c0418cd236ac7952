"""Tests the judge server of a run with vLLM and the tiny model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from keel.configs.schema import ColdStartConfig, JudgeConfig, JudgeServerConfig, TinyModelConfig
from keel.model.tiny.build import ensure_tiny_model
from keel.model.tiny.cold_start import Curriculum
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rewards.judge.service import JudgeService
from keel.rewards.scorer import Scorer
from keel.rl.types import Prompt
from keel.rollout.judge import server as judge_server
from keel.rollout.judge.server import MAX_RESTARTS, RECENT_S, JudgeServer
from tests.rewards.groups import group
from tests.waiting import PATIENCE_S, start_local_ray

CRITERIA = [
    {"name": "blue", "text": "says blue", "weight": 0.5},
    {"name": "brief", "text": "is brief", "weight": 0.5},
]
PROMPT = Prompt(
    prompt_id="chat/1",
    domain="chat",
    messages=({"role": "user", "content": "What colour is the sky?"},),
    reward={"kind": "rubric", "criteria": CRITERIA},
)
BLUE, RED, GREEN = (f"<think></think>{answer}" for answer in ("Blue.", "Red, I think.", "Green."))


@pytest.fixture
def cluster() -> Iterator[None]:
    start_local_ray(num_cpus=2)
    yield
    ray.shutdown()


def processes_of(model: str) -> list[int]:
    """Return the processes of the reaper, the server and their descendants."""
    pids: list[int] = []
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.name)] = int(stat[1])
        if stat[0] != "Z" and model in words.split("\0"):
            pids.append(int(entry.name))
    for pid in pids:  # grows during the loop
        pids.extend(
            child for child, parent in parents.items() if parent == pid and child not in pids
        )
    return pids


def gone(pids: list[int]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.e2e
@pytest.mark.usefixtures("cluster")
def test_server_judges_and_restarts(tmp_path: Path) -> None:
    """The model has random weights, so only the schema determines the form of its replies."""
    cold = ColdStartConfig(steps=0)
    tiny = TinyModelConfig(max_context=6144, cache_dir=str(tmp_path), cold_start=cold)
    quote = build_tokenizer().convert_tokens_to_ids('"')
    config = JudgeConfig(
        model=str(ensure_tiny_model(tiny, Curriculum(seed=0))),
        serve=True,
        server=JudgeServerConfig(dtype="float32", startup_timeout_s=2 * PATIENCE_S),
        timeout_s=PATIENCE_S,
        # Lets its reasons end.
        temperature=1.0,
        extra={"logit_bias": {str(quote): 5}},
        max_reply_tokens=1500,
    )
    server = JudgeServer(config, gpu=False)
    with (
        JudgeService(config, servers=[server]) as judge,
        Scorer({"chat": {"rubric": 1.0}}, workers=0, judge=judge) as scorer,
    ):
        judge.check_reachable()
        (scored,) = scorer.score([group(BLUE, RED, prompt=PROMPT)])
        assert scored.group.dropped == ()
        assert all(reward in (0, 0.25, 0.5, 0.75, 1) for reward in scored.rewards_G)
        before = processes_of(config.model)
        assert len(before) >= 3  # reaper, server, engine

        ray.kill(server._actor)
        assert gone(before)

        (scored,) = scorer.score([group(GREEN, prompt=PROMPT)])
        counts = judge.counts()
        assert scored.group.dropped == () and server.restarts == counts.restarts == 1
        assert (counts.completions, counts.skipped, counts.failed) == (3, 0, {})
        after = processes_of(config.model)
        assert len(after) >= 3
        server.stop()
        assert gone(after)
        server.stop()


def test_only_recent_restarts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, actor = [0.0], object()

    def launch(self: Any) -> None:
        self._actor = actor

    monkeypatch.setattr(judge_server.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(judge_server.ray_timeouts, "kill", lambda _: None)
    monkeypatch.setattr(JudgeServer, "_launch", launch)
    monkeypatch.setattr(JudgeServer, "_wait", lambda _: "http://somewhere")
    monkeypatch.setattr(JudgeServer, "_ended", lambda _: "it died")
    judge = JudgeServer(JudgeConfig(model="m", serve=True), gpu=False)
    for _ in range(3 * MAX_RESTARTS):
        assert judge.url() == "http://somewhere"
        now[0] += RECENT_S / MAX_RESTARTS + 1
    assert judge.restarts == 3 * MAX_RESTARTS - 1
    with pytest.raises(RuntimeError, match="times"):
        for _ in range(MAX_RESTARTS + 1):
            judge.url()
