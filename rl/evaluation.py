"""Evaluation metrics, and the definition of a pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

from keel.rl.metrics import Mean, Metric, Sum, mean_of
from keel.rl.types import FUNCTIONS, ScoredGroup

ERROR = "error"
"""Reward part that is above 0 if scoring the completion failed."""
_PASS = 1 - 1e-9
"""Lowest `correct` of a completely right completion: 1, up to rounding of a weighted mean. Rewards
keep partial credit well below (`keel.rewards.rules.reasoning_gym`)."""
FAIL = 1e-9
"""Highest `correct` of a completion without any credit: 0, up to rounding."""


def passed(correct: float) -> bool:
    """Return whether a completion is completely right; partial credit and NaN are not.

    Evaluations, filters and comparisons all use this rule.
    """
    return correct >= _PASS


def pass_at_k(samples: int, passes: int, k: int) -> float:
    """Estimate the probability that one of k completions passes, without bias.

    1 − C(n−c, k) / C(n, k) for n `samples` with c `passes` (Chen et al., 2021, Eq. 1). Raises
    ValueError unless 1 ≤ k ≤ samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} completions: k must be between 1 and {samples}")
    return 1 - math.comb(samples - passes, k) / math.comb(samples, k)


def evaluation(groups: Sequence[ScoredGroup]) -> dict[str, Metric]:
    """Compute the metrics of a held-out set, with one or more completions per prompt.

    pass@1    fraction of the requested completions that are completely right (`passed`), where
              missing and unscored ones count as wrong (Chen et al., 2021, k = 1)
    score     mean of `correct` over the present completions, including partial credit; 0 if the
              verifier failed
    unscored  number of completions that are missing or whose `correct` could not be determined
    """
    correct = [parts["correct"] for group in groups for parts in group.parts_G]
    missing = sum(len(group.group.dropped) for group in groups)
    failed = sum(
        parts.get(ERROR, 0.0) > 0 and not passed(parts["correct"]) and _correct_failed(group, index)
        for group in groups
        for index, parts in enumerate(group.parts_G)
    )
    return {
        "pass@1": Mean(float(sum(map(passed, correct))), float(len(correct) + missing)),
        "score": mean_of(correct),
        "unscored": Sum(float(missing + failed)),
    }


def _correct_failed(group: ScoredGroup, index: int) -> bool:
    """Return whether the failed part determines `correct`."""
    if not group.notes_G or group.group.prompt.reward.get("kind") == FUNCTIONS:
        return True
    return "correct" in group.notes_G[index]
