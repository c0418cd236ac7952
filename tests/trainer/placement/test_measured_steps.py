"""Compares the planner's estimates with training steps measured on H200s."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.training.cases import Case, estimates, model_of
from keel.model.load import facts_of
from keel.trainer.placement.memory import GIB
from keel.trainer.placement.step_time import Rates

USUAL = Case(shape="", length=1024, micro_batch_tokens=16_384, step_tokens=65_536)
WIDE = {"micro_batch_tokens": 32_768}
LONG = {"length": 4096, **WIDE}
SLICE: list[tuple[float, float, dict[str, Any]]] = [
    (0.523, 89.8, {}),
    (0.485, 103.6, WIDE),
    (0.592, 103.6, LONG),
    (0.672, 78.7, {"recompute": True}),
    (0.452, 89.3, {"compiled": True}),
    (0.420, 102.7, {"compiled": True, **WIDE}),
]
QWEN3_17B: list[tuple[float, float, dict[str, Any]]] = [
    (1.430, 69.2, {}),
    (1.382, 106.0, WIDE),
    (1.655, 106.0, LONG),
    (1.806, 36.1, {"recompute": True}),
    (1.180, 55.6, {"compiled": True}),
]
MIXTURE: list[tuple[float, float, dict[str, Any]]] = [
    (0.475, 41.6, {}),
    (0.357, 53.6, WIDE),
    (0.432, 53.6, LONG),
    (0.645, 29.6, {"recompute": True}),
]
COPIED = replace(Rates(), summed_bytes=Rates().gradient_bytes)
"""Rates of the commit behind the last two tables, which copied gradients before adding them."""
STEPS = [
    pytest.param(seconds, gib, replace(USUAL, shape=shape, **changes), rates, id=f"{shape}-{index}")
    for shape, rates, rows in (
        ("30b-a3b-slice", Rates(), SLICE),
        ("qwen3-1.7b", COPIED, QWEN3_17B),
        ("moe-1.6b", COPIED, MIXTURE),
    )
    for index, (seconds, gib, changes) in enumerate(rows)
]
"""Seconds, GiB of GPU memory, and the case of `python -m benchmarks.training`."""


@pytest.mark.parametrize(("seconds", "gib", "case", "rates"), STEPS)
def test_estimates_are_within_a_tenth(seconds: float, gib: float, case: Case, rates: Rates) -> None:
    """Memory may be underestimated by at most 3 %, so that recipes which pass `keel check` fit."""
    facts = facts_of(model_of(case.shape, small=False))
    estimated_s, estimated_bytes = estimates(case, facts, gpu=True, rates=rates)
    assert 0.9 <= estimated_s / seconds <= 1.1
    assert 0.97 <= estimated_bytes / GIB / gib <= 1.1
