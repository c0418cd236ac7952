"""The mixed recipe from end to end, with a judge on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray

from keel.rewards.sandbox.sandbox import IsolationError, open_sandbox
from keel.trainer.cli import main
from tests.rewards.judge.judge_server import good, running
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e


def words(command: str, folder: Path, *overrides: str) -> list[str]:
    return [
        command,
        "mixed",
        f"run.dir={folder / 'run'}",
        f"model.embedded.cache_dir={folder / 'cache'}",
        "model.embedded.cold_start.steps=20",
        "run.steps=2",
        "data.sources[spelling].size=1000",  # thousands of puzzles take seconds
        "data.sources[spiral].size=1000",
        "rollout.engines=1",
        "rewards.judge.model=m",
        f"rewards.judge.deadline_s={PATIENCE_S}",
        f"rewards.deadline_s={PATIENCE_S}",  # of the machine's time, which may be busy
        "rewards.code.completion_s=60",
        "rewards.code.time_s=20",
        *overrides,
    ]


def test_four_domains_train_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        open_sandbox("bubblewrap")
    except IsolationError as error:
        pytest.skip(str(error))
    with running(good) as server:
        status = main(words("train", tmp_path, f"rewards.judge.base_url={server.url}"))
    said = capsys.readouterr()
    assert status == 0, said.out + said.err
    assert "code: 12 of 12 reference solutions run, all pass" in said.out
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["step"] == 2
    # The engine sampled with exactly the trainer's weights, which a step has changed.
    assert last["staleness/mean"] == 0 and last["mismatch/logp_abs"] <= 1e-4
    assert last["routing/fallback_fraction"] == 0 and last["sampling/kept_mean"] >= 1
    for domain in ("spelling", "spiral", "code", "chat"):
        assert f"domain/{domain}/reward_mean" in last
    # Of 12 prompts one sixth is for the judge, and of those asked instead of filtered groups.
    assert last["judge/completions"] >= 16 and last["judge/completions"] % 8 == 0
    assert sum(value for name, value in last.items() if name.startswith("rollout/filtered")) > 0
    assert last["judge/failures"] == last["reward/error"] == 0
    assert "reward/length_cost" in last


def test_a_judge_that_cannot_be_reached_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        open_sandbox("bubblewrap")
    except IsolationError as error:
        pytest.skip(str(error))
    overrides = ["rewards.judge.base_url=http://127.0.0.1:9/v1", "rewards.judge.retries=0"]
    assert main(words("train", tmp_path, *overrides)) == 1
    said = capsys.readouterr()
    assert "rewards.judge.base_url = 'http://127.0.0.1:9/v1'" in said.err
    assert "cold start" not in said.out and not ray.is_initialized()
