"""Compute evaluation metrics and decide when a completion passes."""

import math
from collections.abc import Sequence

from keel.rl.metrics import Mean, Metric, Sum, mean_of
from keel.rl.types import FUNCTIONS, ScoredGroup

ERROR = "error"  # name of the reward component that is positive if a completion could not be scored
_PASS = 1 - 1e-9
"""Minimum `correct` value of a passing completion. It is slightly below 1 to tolerate rounding in a
weighted mean. Reward functions keep partial credit well below it
(`keel.rewards.rules.reasoning_gym`)."""
FAIL = 1e-9
"""Maximum `correct` value of a completion without any credit. It is slightly above 0 to tolerate
rounding."""


def passed(correct: float) -> bool:
    """Return True if a completion is fully correct. Partial credit and NaN do not count."""
    return correct >= _PASS


def pass_at_k(samples: int, passes: int, k: int) -> float:
    """Estimate the probability that at least one of k completions passes, without bias: 1 − C(n−c,
    k) / C(n, k), where n is `samples` and c is `passes` (Chen et al., 2021, Eq. 1). Raises
    ValueError unless 1 ≤ k ≤ samples."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} completions: k must be between 1 and {samples}")
    return 1 - math.comb(samples - passes, k) / math.comb(samples, k)


def evaluation(groups: Sequence[ScoredGroup]) -> dict[str, Metric]:
    """Compute evaluation metrics from scored groups.

    pass@1    fraction of the requested completions that are fully correct (`passed`), where
              missing and unscored ones count as wrong (Chen et al., 2021, k = 1)
    score     mean of `correct` over all scored completions, including partial credit; 0 if the
              verifier failed
    unscored  number of completions that are missing or whose `correct` could not be determined
    """
    correct = [parts["correct"] for group in groups for parts in group.parts_G]
    missing = sum(len(group.group.dropped) for group in groups)
    failed = 0
    for group in groups:
        functions = group.group.prompt.reward.get("kind") == FUNCTIONS
        for index, parts in enumerate(group.parts_G):
            ours = not group.notes_G or functions or "correct" in group.notes_G[index]
            failed += parts.get(ERROR, 0.0) > 0 and not passed(parts["correct"]) and ours
    return {
        "pass@1": Mean(float(sum(map(passed, correct))), float(len(correct) + missing)),
        "score": mean_of(correct),
        "unscored": Sum(float(missing + failed)),
    }
