"""What a sample of prompts and completions says of all like them: intervals, paired differences,
majority votes, the shortest of several."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

Z = 1.959964
"""Of a normal distribution's middle 95 %."""
RESAMPLED = 4000
"""Draws of the bootstrap and of the signs."""
VOTES = 200
"""Draws of k completions, for a vote among fewer than there are."""
_CHUNK = 1 << 22
"""Numbers drawn at once."""


def pass_interval(passes_P: Sequence[int], samples_P: Sequence[int]) -> tuple[float, float]:
    """95 % interval of pass@1 over prompts like these P, by `samples_P` completions to each.

    Completions to one prompt resemble each other, so they count as fewer: Wilson's interval with
    the effective number p(1−p)/v, v the variance of p between prompts (Dean and Pagano, 2015); as
    many as there are prompts where none or all pass. Raises ValueError without a completion.
    """
    passes, samples = np.asarray(passes_P, float), np.asarray(samples_P, float)
    total, prompts = samples.sum(), len(samples)
    if not total:
        raise ValueError("an interval of no completion")
    share = passes.sum() / total
    number = float(prompts)
    if 0 < share < 1 and prompts > 1:
        residuals = passes - share * samples
        variance = prompts / (prompts - 1) * (residuals**2).sum() / total**2
        number = min(share * (1 - share) / variance, total) if variance else float(total)
    middle = (share + Z**2 / (2 * number)) / (1 + Z**2 / number)
    half = Z / (1 + Z**2 / number)
    half *= math.sqrt(share * (1 - share) / number + Z**2 / (4 * number**2))
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Of the means of two measurements of the same prompts: second − first."""

    mean: float
    low: float
    high: float
    """95 % of resampled prompts lie between these."""
    p: float
    """Chance of one as large or larger if it were mere chance which of the two is which (signs
    flipped at random, prompt by prompt)."""


def paired_difference(first_P: Sequence[float], second_P: Sequence[float]) -> Difference:
    """Entry i of both is of the same prompt. The same for the same numbers. Raises ValueError where
    they are not as many, or none."""
    if len(first_P) != len(second_P) or not len(first_P):
        raise ValueError(f"{len(first_P)} and {len(second_P)} measurements are no pairs")
    d_P = np.asarray(second_P, float) - np.asarray(first_P, float)
    rng, prompts, mean = np.random.default_rng(0), len(d_P), float(d_P.mean())
    means, flipped = list[float](), list[float]()
    while len(means) < RESAMPLED:
        draws = min(RESAMPLED - len(means), max(1, _CHUNK // prompts))
        means += d_P[rng.integers(0, prompts, (draws, prompts))].mean(1).tolist()
        signs = rng.integers(0, 2, (draws, prompts)) * 2 - 1
        flipped += (signs * d_P).mean(1).tolist()
    low, high = np.quantile(means, (0.025, 0.975))
    extreme = int((np.abs(flipped) >= abs(mean) - 1e-12).sum())
    return Difference(
        mean=mean, low=float(low), high=float(high), p=(1 + extreme) / (1 + RESAMPLED)
    )


def majority_at_k(answers: Sequence[str], right: str, k: int) -> float:
    """maj@k: chance that the most frequent of k of the `answers` is `right` (Wang et al., 2023).
    Answers that lead together share it; an empty one is none. Exact where k is their number, else
    over `VOTES` seeded draws. Raises ValueError unless 1 ≤ k ≤ their number."""
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@{k} of {len(answers)} answers: k must be from 1 to their number")
    if k == len(answers):
        return _elected(answers, right)
    rng = np.random.default_rng(0)
    drawn: list[list[int]] = [rng.permutation(len(answers))[:k].tolist() for _ in range(VOTES)]
    return float(np.mean([_elected([answers[n] for n in votes], right) for votes in drawn]))


def fewest_steps_at_k(steps: Sequence[int | None], right: Sequence[bool], k: int) -> float:
    """Chance that, of k of these trajectories, the finished one with the fewest steps is right;
    several with as few are as likely each. Where none has finished, none is right. Exact.
    Parallel-fewest-step, DeepSeek-V3.2 (2025), section 4.4.

    steps: of each, None where it has not finished. Raises ValueError unless 1 ≤ k ≤ their number.
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
        # All k of those with no fewer steps, and not all of those with more or unfinished.
        draws = comb(total - fewer, k) - comb(total - fewer - len(of_least), k)
        chance += draws / comb(total, k) * sum(of_least) / len(of_least)
    return chance


def _elected(answers: Sequence[str], right: str) -> float:
    votes = Counter(answer for answer in answers if answer)
    most = max(votes.values(), default=0)
    leading = [answer for answer, count in votes.items() if count == most]
    return (right in leading) / len(leading) if leading else 0.0
