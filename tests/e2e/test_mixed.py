"""The mixed recipes with a local judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keel.commands.cli import main
from keel.examples.small.__main__ import make
from keel.rewards.sandbox.sandbox import IsolationError, open_sandbox
from tests.e2e.in_process import in_this_process
from tests.rewards.judge.judge_server import good, running
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e


HELD = ("general", "search", "interpreter")
AGENTS = (*HELD, "code")
DOMAINS = ("spelling", "spiral", "programs", "chat", *AGENTS)


def test_all_domains_train_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasoning, four families of agents, and alignment."""
    try:
        open_sandbox("bubblewrap")
    except IsolationError as error:
        pytest.skip(str(error))
    tmp_path.chmod(0o755)  # environments run in it as another user
    monkeypatch.chdir(tmp_path)
    tasks = tmp_path / "small-tasks"
    assert make(tasks, general=6, search=6, code=1, programs=2, lessons=2, seed=0) == 0
    overrides = [
        f"run.dir={tmp_path / 'run'}",
        f"model.tiny.cache_dir={tmp_path / 'cache'}",
        "rewards.judge.model=m",
        f"rewards.judge.timeout_s={PATIENCE_S}",
        f"rewards.timeout_s={PATIENCE_S}",
        "rewards.code.completion_s=60",
        "rewards.code.time_s=20",
        "model.tiny.cold_start.steps=40",
        "model.tiny.cold_start.batch_size=32",
        "run.steps=2",
        "run.eval_every=2",
        "rollout.engines=1",
        "algorithm.group_size=2",
        "data.sources[general].size=6",
        *(f"data.sources[{name}].size=200" for name in ("spelling", "spiral", "interpreter")),
        *(f"data.sources[{name}].holdout=1" for name in ("spelling", "spiral", *HELD)),
        "data.sources[code].holdout=0",
        "data.sources[chat].budget.max_tokens=5",
    ]
    monkeypatch.setattr("keel.rewards.checks._REFERENCES_S", PATIENCE_S)
    with running(good) as server, in_this_process():
        url = f"rewards.judge.base_url={server.url}"
        status = main(["train", "mixed-agents", url, *overrides])
    output = capsys.readouterr()
    assert status == 0, output.out + output.err
    assert "programs: 12 of 12 " in output.out
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    _, *steps = map(json.loads, lines)
    assert [one["step"] for one in steps] == [1, 2]
    for step in steps:
        # The engine had exactly the trainer's weights, which a step has changed.
        assert step["staleness/mean"] == 0 and step["mismatch/logp_abs"] <= 1e-4
        assert step["routing/fallback_fraction"] == 0 and step["sampling/kept_mean"] >= 1
        assert step["judge/completions"] >= 2 and step["judge/failures"] == 0
        assert step["reward/error"] == step["rollout/dropped_completions"] == 0
        # Every domain is in every step, as the source weights add up to its prompts.
        assert all(f"domain/{domain}/reward_mean" in step for domain in DOMAINS)
        assert all(f"domain/{domain}/calls_mean" in step for domain in AGENTS)
        assert step["domain/chat/length_mean"] <= 5
    assert max(step["agents/calls_mean"] for step in steps) > 0
    assert all(f"eval/{name}/pass@1" in steps[-1] for name in HELD)
