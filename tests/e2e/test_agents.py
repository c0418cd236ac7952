"""A policy with tools from end to end: trained, written down, resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keel.rewards.sandbox.environments import environment_wrap
from keel.rewards.sandbox.sandbox import IsolationError

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.e2e


def train(folder: Path, *overrides: str) -> tuple[str, list[dict[str, Any]]]:
    """What was said, and the metrics of each step."""
    command = [
        *("train", "agent-trip"),
        f"run.dir={folder / 'run'}",
        f"model.embedded.cache_dir={folder / 'cache'}",
        "model.embedded.cold_start.steps=120",  # enough for calls that can be read
        "run.checkpoint_every=1",
        "data.sources[trip].size=64",
        "data.sources[trip].holdout=8",
        "rollout.engines=1",
        "algorithm.prompts_per_step=4",
        "algorithm.group_size=4",
        *overrides,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "keel.trainer.cli", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return done.stdout, [json.loads(line) for line in lines]


def test_a_policy_with_tools_is_trained_and_resumed(tmp_path: Path) -> None:
    isolation = "bubblewrap"
    try:
        environment_wrap(isolation)
    except IsolationError:  # tests/rewards/sandbox has what is said then
        isolation = "none-i-trust-the-environments"
    knob = f"data.sources[trip].environment.isolation={isolation}"
    said, steps = train(tmp_path, "run.steps=2", knob)
    assert "trip, its environment: opens in" in said and "get_all_hotels_by_city" in said
    assert [step["step"] for step in steps] == [0, 1, 2]
    for step in steps[1:]:
        assert step["agents/turns_mean"] >= 1 and step["agents/calls_mean"] > 0
        assert step["rollout/dropped_completions"] == step["reward/error"] == 0
        assert step["routing/fallback_fraction"] == 0
        assert step.get("mismatch/logp_abs", 0.0) < 1e-4
    assert {"reward/correct", "reward/progress", "eval/trip/pass@1"} <= steps[-1].keys()
    text = (tmp_path / "run" / "trajectories" / "step_000002.txt").read_text()
    assert "[call " in text and " calls (" in text and "the environment says: " in text
    _, steps = train(tmp_path, "run.steps=3", knob)
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert steps[3]["agents/turns_mean"] >= 1
