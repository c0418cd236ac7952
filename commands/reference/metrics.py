"""Every metric that a step writes (`metrics.jsonl`, TensorBoard, `keel report`): what it means, in
which unit, and what it looks like when all is well. `<part>` in a name stands for any."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from keel.commands.reference.metric import Metric
from keel.commands.reference.of_learning import LEARNING
from keel.commands.reference.of_sampling import SAMPLING

GROUPS = {**LEARNING, **SAMPLING}
METRICS = tuple(metric for group in GROUPS.values() for metric in group)
NO_METRICS = frozenset({"step", "time"})
"""Beside them in a line of `metrics.jsonl`: the step, and seconds since the epoch."""


@cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"<\w+>", name)
    return re.compile(".+".join(map(re.escape, parts)))


def described(name: str) -> Metric | None:
    """What a metric of that name is; the one that names most of it."""
    found = [metric for metric in METRICS if _pattern(metric.name).fullmatch(name)]
    return min(found, key=lambda metric: metric.name.count("<"), default=None)


def undescribed(names: Iterable[str]) -> list[str]:
    """Those of a line of `metrics.jsonl` that nothing here describes, in order."""
    return sorted(name for name in {*names} - NO_METRICS if described(name) is None)
