"""A recipe whose policy an agent program drives: checked, trained, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from keel.rewards.sandbox.environments import environment_wrap
from keel.rewards.sandbox.sandbox import IsolationError
from tests.agents.sandboxes import commands

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.e2e
AGENT = """
from openai import OpenAI

def solve(task):
    client = OpenAI()  # all that it knows of Keel are OpenAI's environment variables
    asked = task["messages"][-1]
    messages = [asked]
    for _ in range(2):
        reply = client.chat.completions.create(model="any", messages=messages, temperature=0.1)
        messages += [reply.choices[0].message.model_dump(exclude_none=True), asked]
    return reply.choices[0].message.content
"""
RECIPE = """
run: {{dir: {run}, steps: 2}}
model:
  path: embedded
  dtype: float32
  embedded: {{cache_dir: {cache}, cold_start: {{steps: 60}}}}
data:
  max_prompt_tokens: 64
  sources:
    - name: spelling
      source: reasoning_gym
      task: spell_backward
      params: {{min_word_len: 4, max_word_len: 7}}
      size: 200
      holdout: 4
      thinking: false
      environment: {{program: "my_agent:solve", folder: {folder}, isolation: {isolation}}}
agents: {{max_turns: 3, window: 192, max_open: 16}}
rollout:
  engines: 1
  sampling: {{top_p: 0.95, top_k: 64, max_tokens: 48}}
algorithm: {{prompts_per_step: 3, group_size: 4}}
"""


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for temporary files, with a short name: sockets are put there."""
    with tempfile.TemporaryDirectory(prefix="ka", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def test_a_program_drives_a_policy_that_is_trained(tmp_path: Path, scratch: Path) -> None:
    isolation = "bubblewrap"
    try:
        environment_wrap(isolation)
    except IsolationError:  # tests/rewards/sandbox has what is said then
        isolation = "none-i-trust-the-environments"
    folder = tmp_path / "work"
    for made in (tmp_path, folder, scratch):
        made.mkdir(exist_ok=True)
        made.chmod(0o755)
    (folder / "my_agent.py").write_text(AGENT)
    run = tmp_path / "run"
    (tmp_path / "recipe.yaml").write_text(
        RECIPE.format(run=run, cache=tmp_path / "cache", folder=folder, isolation=isolation)
    )
    done = subprocess.run(
        [sys.executable, "-m", "keel.trainer.cli", "train", str(tmp_path / "recipe.yaml")],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch), "RAY_TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its program: asked a model by script for 2 turns" in done.stdout
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]
    for step in steps[1:]:
        assert step["agents/turns_mean"] == 2 and step["agents/segments_mean"] == 1
        assert step["rollout/dropped_completions"] == step["reward/error"] == 0
        assert step["routing/fallback_fraction"] == 0
        assert step.get("mismatch/logp_abs", 0.0) < 1e-4
        assert step["agents/tools_seconds_mean"] > 0 and "reward/correct" in step
    text = (run / "trajectories" / "step_000002.txt").read_text()
    assert "    2 turns, 0 calls" in text and text.count("[user] Spell this") >= 4
    assert not list(scratch.glob("keel-*")) and not commands(str(folder).encode())
