"""Assignment of trajectories to ranks and micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.rl.packing import balance, items


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 4), st.integers(1, 100))
def test_balance_places_every_item_once(tokens, ranks, capacity) -> None:
    plan = balance(tokens, ranks=ranks, capacity=capacity)
    assert len(plan) == ranks
    assert len({len(bins) for bins in plan}) == 1
    placed = [item for bins in plan for chosen in bins for item in chosen]
    assert sorted(placed) == list(range(len(tokens)))
    for chosen in (chosen for bins in plan for chosen in bins):
        assert len(chosen) <= 1 or sum(tokens[i] for i in chosen) <= capacity


def test_balance_is_even() -> None:
    random = np.random.default_rng(0)
    tokens = random.lognormal(6, 0.8, 512).astype(int).clip(1, 4096).tolist()
    plan = balance(tokens, ranks=8, capacity=8192)
    loads = np.array([[sum(tokens[i] for i in chosen) for chosen in bins] for bins in plan])
    assert loads.shape[1] == -(-sum(tokens) // (8 * 8192))
    assert np.ptp(loads.sum(1)) < 0.01 * loads.sum(1).mean()
    assert np.ptp(loads, axis=0).max() < 0.05 * loads.mean()


def test_uneven_bins_alternate_over_ranks() -> None:
    plan = balance([10, 9, 8, 7], ranks=2, capacity=10)
    assert plan == [[[0], [3]], [[1], [2]]]


def test_bins_may_be_exactly_full() -> None:
    assert balance([6, 4], ranks=1, capacity=10) == [[[0, 1]]]


def test_oversized_items_get_their_own_bin() -> None:
    assert balance([3, 100, 3, 3], ranks=1, capacity=10) == [[[1], [0, 2, 3]]]


def test_large_items_need_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying more bins one by one would take seconds with thousands of items."""
    counts: list[int] = []
    fill = items._fill

    def counting(tokens: Any, sizes: Any, order: Any, count: int, capacity: int) -> Any:
        counts.append(count)
        return fill(tokens, sizes, order, count, capacity)

    monkeypatch.setattr(items, "_fill", counting)
    tokens = [4200 + 37 * i % 3800 for i in range(400)]
    (bins,) = balance(tokens, ranks=1, capacity=8192)
    assert len(bins) == 400 and counts == [400]
