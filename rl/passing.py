"""What counts as a pass: the one rule of evaluations, filters and comparisons."""

from __future__ import annotations

PASS = 1 - 1e-9
"""`correct` of an answer that is wholly right is 1, up to the rounding of a mean or of weights that
add up to 1. Whoever gives credit keeps partial credit well below
(`keel.rewards.rules.reasoning_gym.MOST_PARTIAL`)."""
FAIL = 1e-9
"""`correct` of one that has no credit at all, to the same rounding."""


def passed(correct: float) -> bool:
    """Whether an answer is wholly right. Partial credit is no pass, and neither is NaN."""
    return correct >= PASS
