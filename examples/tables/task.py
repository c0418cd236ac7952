"""What a task of tables is made of."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Files = dict[str, str]
"""Text by name."""
CLEAR = 0.002
"""Of the range of all values, by which the first must lead."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A question and its answer."""

    question: str
    value: float | str
    decimals: int = 0

    @property
    def clear(self) -> bool:
        """Whether a neighbour in the last decimal can be told from another answer: of 0.001 they
        are 0 and its double."""
        if isinstance(self.value, str) or not self.decimals:
            return True
        return round(abs(self.value) * 10**self.decimals) not in (1, 2)

    @property
    def rule(self) -> dict[str, Any]:
        """As a line of JSONL has it. A last decimal that was rounded the other way is right."""
        if isinstance(self.value, str):
            return {"answer": self.value, "match": "exact"}
        text = f"{self.value:.{self.decimals}f}"
        if not self.decimals:
            return {"answer": text, "match": "math"}
        # Relative to what is written; absolute for a 0.
        near = 1.1 * 10**-self.decimals / (abs(float(text)) or 1.0)
        return {"answer": text, "match": "math", "tolerance": float(f"{near:.3g}")}


def clear_first(values: Mapping[str, float], question: str) -> Answer | None:
    """The name with the largest value; None where another is as good."""
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
