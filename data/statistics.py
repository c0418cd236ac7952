"""Statistics for evaluations: confidence intervals, paired differences, maj@k and fewest@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

_Z = 1.959964
"""The two-sided 95 % quantile of the normal distribution."""
_RESAMPLES = 4000
"""How many bootstrap resamples and sign flips to draw."""
_VOTES = 200
"""How many random subsets of k completions to draw for maj@k."""
_CHUNK = 1 << 22
"""The most random numbers to draw at once."""


def pass_interval(passes_P: Sequence[int], samples_P: Sequence[int]) -> tuple[float, float]:
    """Compute the 95 % interval for pass@1 over the population of prompts.

    Completions to the same prompt are correlated. The function therefore uses Wilson's interval
    with the effective number p(1−p)/v, where v is the variance of p between prompts (Dean and
    Pagano, 2015). If all or no completions pass, it uses the number of prompts. Raises ValueError
    if there are no completions.
    """
    passes, samples = np.asarray(passes_P, float), np.asarray(samples_P, float)
    total, prompts = samples.sum(), len(samples)
    if not total:
        raise ValueError("pass@1 interval without a completion")
    share = passes.sum() / total
    number = float(prompts)
    if 0 < share < 1 and prompts > 1:
        residuals = passes - share * samples
        variance = prompts / (prompts - 1) * (residuals**2).sum() / total**2
        number = min(share * (1 - share) / variance, total) if variance else float(total)
    middle = (share + _Z**2 / (2 * number)) / (1 + _Z**2 / number)
    half = _Z / (1 + _Z**2 / number)
    half *= math.sqrt(share * (1 - share) / number + _Z**2 / (4 * number**2))
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The second mean minus the first, for two measurements on the same prompts."""

    mean: float
    low: float
    high: float
    """The upper end of the 95 % bootstrap interval over prompts; `low` is the lower end."""
    p: float
    """The p-value from the sign-flip permutation test over prompts."""


def paired_difference(first_P: Sequence[float], second_P: Sequence[float]) -> Difference:
    """Compare two measurements on the same prompts. The result is deterministic.

    Raises ValueError if they are empty or have different lengths.
    """
    if len(first_P) != len(second_P) or not len(first_P):
        raise ValueError(f"{len(first_P)} and {len(second_P)} measurements are no pairs")
    d_P = np.asarray(second_P, float) - np.asarray(first_P, float)
    rng, prompts, mean = np.random.default_rng(0), len(d_P), float(d_P.mean())
    means, flipped = list[float](), list[float]()
    while len(means) < _RESAMPLES:
        draws = min(_RESAMPLES - len(means), max(1, _CHUNK // prompts))
        means += d_P[rng.integers(0, prompts, (draws, prompts))].mean(1).tolist()
        signs = rng.integers(0, 2, (draws, prompts)) * 2 - 1
        flipped += (signs * d_P).mean(1).tolist()
    low, high = np.quantile(means, (0.025, 0.975))
    extreme = int((np.abs(flipped) >= abs(mean) - 1e-12).sum())
    return Difference(
        mean=mean, low=float(low), high=float(high), p=(1 + extreme) / (1 + _RESAMPLES)
    )


def majority_at_k(answers: Sequence[str], right: str, k: int) -> float:
    """Estimate maj@k: how likely the most frequent of k `answers` is `right` (Wang et al., 2023).

    Tied answers share the probability, and empty answers do not count. The result is exact if k is
    the number of answers; otherwise it is averaged over `_VOTES` seeded draws. Raises ValueError
    unless 1 ≤ k ≤ the number of answers.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@{k} of {len(answers)} answers: k must be from 1 to their number")
    if k == len(answers):
        return _vote(answers, right)
    rng = np.random.default_rng(0)
    drawn: list[list[int]] = [rng.permutation(len(answers))[:k].tolist() for _ in range(_VOTES)]
    return float(np.mean([_vote([answers[n] for n in votes], right) for votes in drawn]))


def fewest_steps_at_k(steps: Sequence[int | None], right: Sequence[bool], k: int) -> float:
    """Compute how likely it is that, among k trajectories, the finished one with the fewest steps
    is right.

    This is Parallel-fewest-step from DeepSeek-V3.2 (2025), section 4.4. The result is exact. Ties
    are broken uniformly, and k unfinished trajectories count as wrong. `steps` is None for an
    unfinished trajectory. Raises ValueError unless 1 ≤ k ≤ the number of trajectories.
    """
    total = len(steps)
    if len(right) != total or not 1 <= k <= total:
        raise ValueError(
            f"fewest@{k} of {total} trajectories ({len(right)} graded): k must be from 1 to their "
            "number"
        )
    chance = 0.0
    for least in sorted({number for number in steps if number is not None}):
        of_least = [ok for number, ok in zip(steps, right, strict=True) if number == least]
        fewer = sum(number is not None and number < least for number in steps)
        # Subsets without fewer steps, minus subsets with only more steps or unfinished.
        draws = comb(total - fewer, k) - comb(total - fewer - len(of_least), k)
        chance += draws / comb(total, k) * sum(of_least) / len(of_least)
    return chance


def _vote(answers: Sequence[str], right: str) -> float:
    votes = Counter(answer for answer in answers if answer)
    most = max(votes.values(), default=0)
    leading = [answer for answer, count in votes.items() if count == most]
    return (right in leading) / len(leading) if leading else 0.0
