"""What is trained on is as long as what was sampled, whatever it takes; and what that costs."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from benchmarks.stability.sampling_ahead import AsReady, longest_of, simulate
from keel.rl.buffer import GroupBuffer


@pytest.mark.parametrize("lag", [0, 1, 2, 4])
@pytest.mark.parametrize("sigma", [0.6, 1.0, 1.5])
def test_long_groups_have_their_share(lag: int, sigma: float) -> None:
    found = simulate(GroupBuffer, lag=lag, sigma=sigma, steps=100)
    assert sorted(found.trained) == sorted(found.sampled), "each is trained on, and once"
    assert found.long() == pytest.approx(1.0, abs=0.02)


def test_the_measure_sees_the_bias_of_taking_what_is_ready_first() -> None:
    for lag, sigma, mean, long in ((1, 0.6, 0.9, 0.1), (1, 1.5, 0.5, 0.1), (4, 1.5, 0.7, 0.2)):
        found = simulate(AsReady, lag=lag, sigma=sigma)
        assert found.mean() < mean and found.long() < long


@pytest.mark.parametrize("refills", [0.25, 2.0])
@pytest.mark.parametrize("lag", [0, 4])
def test_filtering_does_not_look_at_the_clock(lag: int, refills: float) -> None:
    """Half of all groups teach nothing, long or short alike. Where the budget is too small for
    them, those that stay are as long as the others."""
    make = partial(GroupBuffer, filter_by="correct", max_refills=refills)
    found = simulate(make, lag=lag, sigma=1.0, useless=0.5, steps=200)
    # 3,200 groups are trained on; three standard errors.
    assert found.mean() == pytest.approx(1.0, abs=3 * 1.31 / np.sqrt(3_200))
    assert found.long() == pytest.approx(1.0, abs=3 * np.sqrt(19 / 3_200))


def test_a_step_waits_for_its_longest_group_less_the_further_it_is_asked_ahead() -> None:
    longest, steps = (
        longest_of(16, 1.0),
        [simulate(GroupBuffer, lag=n, sigma=1.0).step for n in (0, 1, 2, 4)],
    )
    assert steps[0] == pytest.approx(1 + longest, rel=0.05)
    assert steps == sorted(steps, reverse=True)
    assert steps[1] < 0.65 * steps[0] and steps[3] < 0.35 * steps[0]
