"""What all table tasks share: answers and their rules."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Files = dict[str, str]
"""The contents of each file, by name."""
CLEAR = 0.002
"""Minimum distance between the two largest values, as a fraction of the range of all values."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A question and its answer."""

    question: str
    value: float | str
    decimals: int = 0

    @property
    def clear(self) -> bool:
        """Whether the rounded answer differs from its neighbours in the last decimal."""
        if isinstance(self.value, str) or not self.decimals:
            return True
        return round(abs(self.value) * 10**self.decimals) not in (1, 2)

    @property
    def rule(self) -> dict[str, Any]:
        """Return the JSONL rule, which accepts either rounding of the last decimal."""
        if isinstance(self.value, str):
            return {"answer": self.value, "match": "exact"}
        text = f"{self.value:.{self.decimals}f}"
        if not self.decimals:
            return {"answer": text, "match": "math"}
        # Relative to what is written; absolute for a 0.
        near = 1.1 * 10**-self.decimals / (abs(float(text)) or 1.0)
        return {"answer": text, "match": "math", "tolerance": float(f"{near:.3g}")}


def clear_first(values: Mapping[str, float], question: str) -> Answer | None:
    """Return the name with the largest value as the answer, or None if no value is clearly the
    largest."""
    first, second, *_ = sorted(values.values(), reverse=True)
    if first - second <= CLEAR * (first - min(values.values())):
        return None
    return Answer(question, max(values, key=lambda name: values[name]))


def as_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def as_json(value: Any) -> str:
    return json.dumps(value, indent=1)
