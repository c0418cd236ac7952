"""Tests which numbers and sizes of attention heads the cascade kernels support."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from keel.rollout.vllm_fast.cascade.kernels import Heads


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
