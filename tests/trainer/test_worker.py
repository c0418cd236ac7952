"""Rank processes without Ray and DeepSpeed."""

from __future__ import annotations

import pytest

from keel.trainer.worker import host_threads


@pytest.mark.parametrize(
    ("ranks", "gpus", "threads"),
    [(1, 1, 32), (8, 8, 4), (16, 8, 4), (2, 8, 16), (64, 64, 1), (4, 0, 8)],
)
def test_offloading_ranks_share_cores(ranks: int, gpus: int, threads: int) -> None:
    """Ray would give each rank one thread."""
    assert host_threads(ranks, gpus, cores=32) == threads
