"""What a run costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.common import QWEN3_17B
from keel.configs.load import load_config
from keel.model.load import facts_of
from keel.rl.metrics import Sum
from keel.trainer.placement.step_time import token_flops
from keel.trainer.run.costs import CostRates, cost_rows, costs_of
from keel.trainer.run.journal import Journal
from keel.trainer.run.view import PlainView


def test_flops_are_those_of_a_budget() -> None:
    """6·N per trained token, 2 more for a reference model, and nothing for recomputation."""
    config, facts = load_config("gsm8k"), facts_of(QWEN3_17B)
    n = facts.parameters  # dense and tied
    assert token_flops(config, facts) == (6 * n, 2 * n)
    trainer = replace(config.trainer, activation_checkpointing=True)
    assert token_flops(replace(config, trainer=trainer), facts) == (6 * n, 2 * n)
    with_reference = load_config("gsm8k", ["data.sources[gsm8k].kl_coef=0.001"])
    assert token_flops(with_reference, facts) == (8 * n, 2 * n)


def test_steps_add_up_to_the_run(tmp_path: Path) -> None:
    clock = iter((0.0, 1800.0, 1800.0, 5400.0, 5400.0)).__next__
    rates = CostRates(8, 6e9, 2e9)
    journal = Journal(tmp_path, PlainView(1), trajectories=0, costs=rates.metrics, clock=clock)
    journal.record(0, {}, [])  # an evaluation
    journal.record(1, {"train/tokens": Sum(1000.0), "rollout/tokens": Sum(500.0)}, [])
    journal.close()
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["cost/gpu_hours"] for step in steps] == [4.0, 8.0]
    costs = costs_of(tmp_path)
    assert costs == {"cost/gpu_hours": 12.0, "cost/train_flops": 6e12, "cost/rollout_flops": 1e12}
    pretraining = {"cost/gpu_hours": 100.0, "cost/train_flops": 63e12}
    *_, rl, total = cost_rows({"pre-training": pretraining, "RL": costs})
    assert rl == ("RL", "12", "6.00e+12", "1.00e+12", "10.0%")
    assert total[1] == "112" and total[-1] == "100.0%"
