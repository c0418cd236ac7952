"""Computes the cost of a run in GPU-hours and in FLOPs of the model.

A forward pass costs 2 FLOPs per active parameter and token, and a backward pass costs twice as
much. Training therefore costs 6·N·D, as in the usual budgets for pre-training. Attention scores,
activation recomputation and start-up are not counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keel.trainer.run.journal import metric_lines

GPU_HOURS, _TRAINING, _SAMPLING = "cost/gpu_hours", "cost/train_flops", "cost/rollout_flops"
_TOKENS = {_TRAINING: "train/tokens", _SAMPLING: "rollout/tokens"}
HEADER = ("", "GPU-hours", "training FLOPs", "sampling FLOPs", "share of FLOPs")


@dataclass(frozen=True, slots=True)
class CostRates:
    """The GPUs that a run occupies and the FLOPs per token, from which its costs are computed."""

    gpus: int
    """Number of GPUs that the run occupies, including a judge's."""
    train_flops: float
    """FLOPs for each token in training."""
    rollout_flops: float
    """FLOPs for each token in an engine."""

    def metrics(self, numbers: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Return the costs of a step that took `seconds` and whose metrics are `numbers`."""
        costs = {GPU_HOURS: self.gpus * seconds / 3600}
        flops = {_TRAINING: self.train_flops, _SAMPLING: self.rollout_flops}
        return costs | {
            name: flops[name] * numbers[tokens]
            for name, tokens in _TOKENS.items()
            if tokens in numbers
        }


def total_costs(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up the costs of steps or of runs. Other metrics are ignored."""
    totals: dict[str, float] = {}
    for part in parts:
        for name in (GPU_HOURS, *_TOKENS):
            if name in part:
                totals[name] = totals.get(name, 0.0) + part[name]
    return totals


def costs_of(folder: Path) -> dict[str, float]:
    """Return the total costs of the run in `folder`, or an empty dict if it has no records."""
    return total_costs(json.loads(text) for _, text in metric_lines(folder / "metrics.jsonl"))


def cost_rows(runs: Mapping[str, Mapping[str, float]]) -> list[Sequence[str]]:
    """Return a table row for each run and a row for their sum. `HEADER` names the columns."""
    every = total_costs(runs.values())
    flops = every.get(_TRAINING, 0.0) + every.get(_SAMPLING, 0.0)

    def row(name: str, costs: Mapping[str, float]) -> Sequence[str]:
        trained, sampled = costs.get(_TRAINING, 0.0), costs.get(_SAMPLING, 0.0)
        share = (trained + sampled) / flops if flops else 0.0
        hours = f"{costs.get(GPU_HOURS, 0.0):.3g}"
        return (name, hours, f"{trained:.2e}", f"{sampled:.2e}", f"{share:.1%}")

    return [HEADER, *(row(*item) for item in runs.items()), row("together", every)]
