"""Tests the judge server of a run, with vLLM and the tiny model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from keel.configs.schema import ColdStartConfig, JudgeConfig, JudgeServerConfig, TinyModelConfig
from keel.model.tiny.build import ensure_tiny_model
from keel.model.tiny.cold_start import Curriculum
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rewards.judge.service import JudgeService
from keel.rewards.scorer import Scorer
from keel.rl.types import Prompt
from keel.rollout.judge.process import JudgeProcess
from keel.rollout.judge.server import JudgeServer
from tests.rewards.groups import group
from tests.waiting import PATIENCE_S, start_local_ray

pytestmark = pytest.mark.e2e

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


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> JudgeConfig:
    """Tiny model with random weights. Only the schema determines the form of its replies."""
    model = ensure_tiny_model(
        TinyModelConfig(
            max_context=6144,
            cache_dir=str(tmp_path_factory.mktemp("models")),
            cold_start=ColdStartConfig(steps=0),
        ),
        Curriculum(seed=0),
    )
    quote = build_tokenizer().convert_tokens_to_ids('"')
    return JudgeConfig(
        model=str(model),
        serve=True,
        server=JudgeServerConfig(dtype="float32", startup_timeout_s=2 * PATIENCE_S),
        timeout_s=PATIENCE_S,
        # Lets its reasons end.
        temperature=1.0,
        extra={"logit_bias": {str(quote): 5}},
        max_reply_tokens=1500,
    )


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    start_local_ray(num_cpus=2)
    yield
    ray.shutdown()


def processes_of(model: str) -> list[int]:
    """Return the reaper, the server and their descendants."""
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


@pytest.fixture(scope="module")
def failing(config: JudgeConfig, tmp_path_factory: pytest.TempPathFactory) -> JudgeProcess:
    """A server whose model does not exist. It starts in parallel with the working server to save
    time."""
    folder = tmp_path_factory.mktemp("failing")
    missing = replace(config, model=str(folder / "nowhere"))
    return JudgeProcess(missing, gpu=False, host="127.0.0.1", key="k", log=folder / "judge.log")


def test_server_judges_and_restarts(config: JudgeConfig, failing: JudgeProcess) -> None:
    server = JudgeServer(config, gpu=False)
    with (
        JudgeService(config, server=server) as judge,
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
        assert scored.group.dropped == ()
        assert server.restarts == 1
        counts = judge.counts()
        assert (counts.judged, counts.unasked, counts.failed) == (3, 0, {})
        after = processes_of(config.model)
        assert len(after) >= 3
        server.stop()
        assert gone(after)
        server.stop()


def test_a_missing_model(failing: JudgeProcess) -> None:
    with pytest.raises(RuntimeError) as caught:
        failing.wait(2 * PATIENCE_S)
    text = str(caught.value)
    assert "nowhere" in text and "exit status 1" in text and "HFValidationError" in text
