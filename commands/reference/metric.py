"""What is said of a metric."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, or a kind of metrics with `<…>` in their name."""

    name: str
    unit: str
    text: str
    healthy: str = ""
    """Empty: it depends on the task."""
    page: str = ""
    """Of docs/, which says more."""
