"""Metrics that merge correctly across ranks and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

MEASURES = ("/pass@1", "/loss", "/indexer/held")
"""Suffixes of the main evaluation metrics, which summaries and reports show."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean, stored as a sum and a count so that it can be merged with others."""

    total: float
    count: float

    def merge(self, other: Metric) -> Mean:
        assert isinstance(other, Mean)
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean, or NaN if the count is 0."""
        return self.total / self.count if self.count else float("nan")


@dataclass(frozen=True, slots=True)
class Sum:
    """A total, such as a count or a duration."""

    total: float

    def merge(self, other: Metric) -> Sum:
        assert isinstance(other, Sum)
        return Sum(self.total + other.total)

    @property
    def value(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """A maximum, or NaN if any value is NaN."""

    largest: float

    def merge(self, other: Metric) -> Max:
        assert isinstance(other, Max)
        if math.isnan(self.largest) or math.isnan(other.largest):  # max() could drop NaN
            return Max(math.nan)
        return Max(max(self.largest, other.largest))

    @property
    def value(self) -> float:
        return self.largest


Metric = Mean | Sum | Max


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge metrics with the same name. Raises `ValueError` if their types differ."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            before = merged.get(name, metric)
            if type(before) is not type(metric):
                raise ValueError(
                    f"metric {name}: cannot merge a {type(metric).__name__} into a "
                    f"{type(before).__name__}"
                )
            merged[name] = before.merge(metric) if name in merged else metric
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Convert metrics to Python numbers."""
    return {name: metric.value for name, metric in metrics.items()}


def mean_of(items: Iterable[float]) -> Mean:
    """Create a mergeable mean of `items`."""
    return reduce(lambda acc, x: Mean(acc.total + x, acc.count + 1), items, Mean(0.0, 0.0))
