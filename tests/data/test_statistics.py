"""Intervals, paired differences and votes against independent values."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.data.results import fewest_steps_at_k, majority_at_k, paired_difference, pass_interval


def test_wilson_interval() -> None:
    """Brown, Cai and DasGupta (2001): 8 of 10, and none of 10."""
    passes = [1] * 8 + [0] * 2
    # 10 prompts are 9 free residuals: n_eff = p(1−p) / (n/(n−1) · p(1−p)/n) = 9.
    low, high = pass_interval(passes, [1] * 10)
    assert (low, high) == pytest.approx(wilson(0.8, 9), abs=1e-9)
    assert pass_interval([0] * 10, [1] * 10) == pytest.approx((0, 0.2775328), abs=1e-6)
    assert pass_interval([3, 3], [3, 3]) == pytest.approx((1 - 0.6576, 1), abs=1e-4)
    with pytest.raises(ValueError, match="completion"):
        pass_interval([], [])


def wilson(p: float, n: float) -> tuple[float, float]:
    z = 1.959964
    half = z * ((p * (1 - p) + z * z / (4 * n)) / n) ** 0.5
    return (p + z * z / (2 * n) - half) / (1 + z * z / n), (p + z * z / (2 * n) + half) / (
        1 + z * z / n
    )


def test_interval_coverage() -> None:
    rng, held, trials = np.random.default_rng(0), 0, 400
    for _ in range(trials):
        skill = rng.beta(1, 2, 60)  # of each prompt; mean 1/3
        low, high = pass_interval(rng.binomial(4, skill).tolist(), [4] * 60)
        held += low <= 1 / 3 <= high
    assert 0.92 <= held / trials <= 0.98


def test_paired_difference() -> None:
    rng = np.random.default_rng(1)
    hard = rng.uniform(size=200)
    first, second = hard, np.clip(hard + 0.03 + rng.normal(0, 0.05, 200), None, None)
    found = paired_difference(first.tolist(), second.tolist())
    assert found.mean == pytest.approx((second - first).mean())
    assert 0.015 < found.low < found.mean < found.high < 0.045 and found.p < 0.001
    assert found == paired_difference(first.tolist(), second.tolist())
    back = paired_difference(second.tolist(), first.tolist())
    assert back.mean == -found.mean and back.p == found.p
    same = paired_difference([0.5] * 8, [0.5] * 8)
    assert (same.mean, same.low, same.high, same.p) == (0, 0, 0, 1)
    with pytest.raises(ValueError, match="1 and 2"):
        paired_difference([1.0], [1.0, 2.0])


def test_majority() -> None:
    answers = ["a", "a", "b", "b", "c", ""]
    assert majority_at_k(answers, "a", 6) == 0.5
    assert majority_at_k(answers, "c", 6) == 0 == majority_at_k(["", ""], "a", 2)
    exact = np.mean(
        [majority_at_k(list(three), "a", 3) for three in itertools.combinations(answers, 3)]
    )
    assert majority_at_k(answers, "a", 3) == pytest.approx(exact, abs=0.1)
    with pytest.raises(ValueError, match="maj@7 of 6"):
        majority_at_k(answers, "a", 7)


@given(
    st.lists(st.tuples(st.sampled_from([None, 1, 2, 3]), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 6),
)
def test_fewest_steps(ended: list[tuple[int | None, bool]], k: int) -> None:
    """Compared with all subsets of size k."""

    def chosen(drawn: tuple[tuple[int | None, bool], ...]) -> float:
        least = min((steps for steps, _ in drawn if steps is not None), default=None)
        right = [ok for steps, ok in drawn if steps == least and steps is not None]
        return float(np.mean(right)) if right else 0.0

    steps, right = [one for one, _ in ended], [ok for _, ok in ended]
    if k > len(ended):
        with pytest.raises(ValueError, match=f"fewest@{k} of {len(ended)}"):
            fewest_steps_at_k(steps, right, k)
        return
    draws = [chosen(drawn) for drawn in itertools.combinations(ended, k)]
    assert fewest_steps_at_k(steps, right, k) == pytest.approx(np.mean(draws))
