"""What counts as a pass: the one rule of evaluations, filters and comparisons."""

from __future__ import annotations

PASS = 1 - 1e-9
"""`correct` of an answer that is wholly right. Below 1 only by the rounding of a sum or a mean of
parts; the largest partial credit (`rewards.rules.MOST_PARTIAL`, 1,999 tests of 2,000) is less."""
FAIL = 1e-9
"""`correct` of one that has no credit at all, to the same rounding."""


def passed(correct: float) -> bool:
    """Whether an answer is wholly right. Partial credit is no pass, and neither is NaN."""
    return correct >= PASS
