"""What an evaluation says of the completions to a held-out set."""

from __future__ import annotations

from collections.abc import Sequence

from keel.rl.metrics import Mean, Metric, Sum, mean_of
from keel.rl.passing import passed
from keel.rl.types import ScoredGroup

ERROR = "error"
"""Part of a reward that is not 0 where something that scores a completion failed."""


def evaluation(groups: Sequence[ScoredGroup]) -> dict[str, Metric]:
    """Metrics of one held-out set, by any number of completions to each of its prompts.

    pass@1    share of the completions asked for that are wholly right (`keel.rl.passing`). One that
    came
              late, failed or could not be judged counts as wrong. An unbiased estimate with one
              completion to a prompt or many (Chen et al., 2021, k = 1).
    score     mean of `correct`, partial credit included, over the completions that have a score.
    unscored  number of completions that are missing, or whose scoring failed: what `pass@1` counts
              as wrong without having seen that it is.
    """
    correct = [parts["correct"] for group in groups for parts in group.parts_G]
    missing = sum(len(group.group.dropped) for group in groups)
    failed = sum(
        parts.get(ERROR, 0.0) > 0 and not passed(parts["correct"])
        for group in groups
        for parts in group.parts_G
    )
    return {
        "pass@1": Mean(float(sum(map(passed, correct))), float(len(correct) + missing)),
        "score": mean_of(correct),
        "unscored": Sum(float(missing + failed)),
    }
