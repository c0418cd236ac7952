"""What counts as a pass, and what an evaluation says of the completions to its prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from keel.rl.metrics import Mean, Metric, Sum, mean_of
from keel.rl.types import FUNCTIONS, ScoredGroup

ERROR = "error"
"""Part of a reward that is not 0 where something that scores a completion failed."""
PASS = 1 - 1e-9
"""`correct` of a completion that is wholly right is 1, up to the rounding of a mean or of weights
that add up to 1. Whoever gives credit keeps partial credit well below
(`keel.rewards.rules.reasoning_gym.MOST_PARTIAL`)."""
FAIL = 1e-9
"""`correct` of one that has no credit at all, to the same rounding."""


def passed(correct: float) -> bool:
    """Whether a completion is wholly right: the one rule of evaluations, filters and comparisons.
    Partial credit is no pass, and neither is NaN."""
    return correct >= PASS


def pass_at_k(samples: int, passes: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k completions passes, from `samples` of which
    `passes` do: 1 − C(n−c, k) / C(n, k) (Chen et al., 2021, Eq. 1). Raises ValueError unless
    1 ≤ k ≤ samples."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} completions: k must be from 1 to their number")
    return 1 - math.comb(samples - passes, k) / math.comb(samples, k)


def evaluation(groups: Sequence[ScoredGroup]) -> dict[str, Metric]:
    """Metrics of one held-out set, by any number of completions to each of its prompts.

    pass@1    share of the completions asked for that are wholly right (`passed`). One that came
              late, failed or could not be judged counts as wrong. An unbiased estimate with one
              completion per prompt or many (Chen et al., 2021, k = 1).
    score     mean of `correct`, partial credit included, over the completions that are there.
              What a verifier failed at has 0.
    unscored  number of completions that are missing, or of which what says whether they are right
              failed: what `pass@1` counts as wrong without having seen that it is.
    """
    correct = [parts["correct"] for group in groups for parts in group.parts_G]
    missing = sum(len(group.group.dropped) for group in groups)
    failed = sum(
        parts.get(ERROR, 0.0) > 0 and not passed(parts["correct"]) and _of_correct(group, index)
        for group in groups
        for index, parts in enumerate(group.parts_G)
    )
    return {
        "pass@1": Mean(float(sum(map(passed, correct))), float(len(correct) + missing)),
        "score": mean_of(correct),
        "unscored": Sum(float(missing + failed)),
    }


def _of_correct(group: ScoredGroup, index: int) -> bool:
    """Whether what failed was about `correct`, and not a function beside it."""
    if not group.notes_G or group.group.prompt.reward.get("kind") == FUNCTIONS:
        return True
    return "correct" in group.notes_G[index]
