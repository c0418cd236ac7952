"""Metrics that merge: averaging over ranks or micro-batches cannot be done wrongly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

MEASURES = ("/pass@1", "/loss", "/indexer/held")
"""Ends of the names of what is said of each held-out set, in a word: when a command ends, and at
the head of its report."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A sum with the number of things summed."""

    total: float
    count: float

    def merge(self, other: Metric) -> Mean:
        assert isinstance(other, Mean)
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; NaN where nothing was counted."""
        return self.total / self.count if self.count else float("nan")


@dataclass(frozen=True, slots=True)
class Sum:
    """A count or a duration that adds up."""

    total: float

    def merge(self, other: Metric) -> Sum:
        assert isinstance(other, Sum)
        return Sum(self.total + other.total)

    @property
    def value(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """A largest value; NaN if any was."""

    largest: float

    def merge(self, other: Metric) -> Max:
        assert isinstance(other, Max)
        if math.isnan(self.largest) or math.isnan(other.largest):  # max() would drop one of them
            return Max(math.nan)
        return Max(max(self.largest, other.largest))

    @property
    def value(self) -> float:
        return self.largest


Metric = Mean | Sum | Max


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """One mapping from many: values of the same name are merged.

    Raises `ValueError` naming a metric that is a mean in one part and a sum or maximum in another.
    """
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
    """Plain numbers, for writing down."""
    return {name: metric.value for name, metric in metrics.items()}


def mean_of(items: Iterable[float]) -> Mean:
    """The mean of plain numbers."""
    return reduce(lambda acc, x: Mean(acc.total + x, acc.count + 1), items, Mean(0.0, 0.0))
