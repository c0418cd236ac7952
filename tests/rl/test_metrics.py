"""Merging of metrics."""

from __future__ import annotations

import math

import pytest

from keel.rl.metrics import Max, Mean, Sum, mean_of, merge, values


def test_merge_equals_direct_computation() -> None:
    parts = [
        {"mean": mean_of([1.0, 2.0, 6.0]), "sum": Sum(2), "max": Max(3.0)},
        {"mean": mean_of([11.0]), "sum": Sum(5), "max": Max(-1.0), "rare": Mean(1.0, 2)},
        {"mean": mean_of([])},
    ]
    for order in (parts, parts[::-1]):
        assert values(merge(order)) == {"mean": 5.0, "sum": 7.0, "max": 3.0, "rare": 0.5}
    assert merge([]) == {}


def test_empty_mean_is_nan_and_merges_neutrally() -> None:
    assert math.isnan(mean_of([]).value)
    assert mean_of([]).merge(Mean(3.0, 2)) == Mean(3.0, 2)


def test_nan_propagates() -> None:
    for first, second in ((1.0, math.nan), (math.nan, 1.0)):
        assert math.isnan(Max(first).merge(Max(second)).value)
        assert math.isnan(Sum(first).merge(Sum(second)).value)
        assert math.isnan(Mean(first, 1).merge(Mean(second, 1)).value)


def test_types_of_a_name_must_match() -> None:
    with pytest.raises(ValueError, match="loss"):
        merge([{"loss": Mean(1.0, 1)}, {"loss": Sum(1.0)}])
