"""Tests which attention heads the cascade kernels support."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from keel.configs.schema import RolloutConfig
from keel.rollout.vllm_fast.cascade.kernels import Heads
from keel.trainer.placement.memory import read_together


@pytest.mark.parametrize(
    ("heads", "covered", "rows"),
    [
        (Heads(16, 8, 128, 16), True, 8),
        (Heads(32, 8, 128, 16), True, 4),
        (Heads(12, 4, 64, 16), True, 4),
        (Heads(8, 8, 64, 32), True, 16),
        (Heads(8, 8, 256, 16), False, 16),
        (Heads(32, 4, 128, 16), False, 2),
        (Heads(16, 8, 96, 16), False, 8),
        (Heads(16, 8, 128, 24), False, 8),
    ],
)
def test_covered_heads_and_tile_rows(heads: Heads, covered: bool, rows: int) -> None:
    assert heads.covered == covered
    assert heads.rows == rows


@pytest.mark.parametrize("each", range(1, 9))
def test_plan_tile_rows(each: int) -> None:
    heads = Heads(8 * each, 8, 128, 16)
    facts: Any = SimpleNamespace(
        head_size=128, attention_width=128 * 8 * each, kv_heads=8, full_attention=True
    )
    config: Any = SimpleNamespace(
        model=SimpleNamespace(batch_invariant=False),
        engine_dtype="bfloat16",
        rollout=RolloutConfig(recorder="packed"),
        algorithm=SimpleNamespace(group_size=16),
    )
    assert read_together(config, facts) == (heads.rows if heads.covered else 1)
