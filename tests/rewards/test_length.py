"""Laws of the length rule."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.rewards.length import _KEPT_LEAD, LengthRule

ANSWER = st.tuples(st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 1200), st.floats(-0.2, 0.2))
GROUP = st.lists(ANSWER, min_size=1, max_size=12)
COST = {"linear": st.floats(0, 3), "overlong": st.floats(0, 3), "target": st.integers(0, 999)}
RULE = st.builds(LengthRule, limit=st.just(1000), margin=st.integers(1, 1000), **COST)
DAPO = st.builds(
    LengthRule, limit=st.just(1000), margin=st.integers(1, 1000), overlong=COST["overlong"]
)


def rule(**knobs: Any) -> LengthRule:
    return LengthRule(**{"limit": 1000, "margin": 200} | knobs)


def adjust(
    rule: LengthRule, correct: list[float], tokens: list[int], rewards: list[float] | None = None
) -> list[float]:
    return rule.adjustment(
        np.array(correct if rewards is None else rewards), np.array(correct), np.array(tokens)
    ).tolist()


def arrays(group: list[tuple[float, int, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards, correctness and tokens."""
    correct, tokens, extra = (np.array(column) for column in zip(*group, strict=True))
    return correct + extra, correct, tokens


@given(GROUP, RULE, st.booleans())
def test_means_stay_and_leads_keep_their_sign(
    group: list[tuple[float, int, float]], rule: LengthRule, wrong_too: bool
) -> None:
    rule = replace(rule, wrong_too=wrong_too, overlong_charges="right")
    rewards, correct, tokens = arrays(group)
    added = rule.adjustment(rewards, correct, tokens)
    right = correct >= rule.correct_threshold
    assert added[right].sum() == pytest.approx(0, abs=1e-9)
    assert added[~right].sum() == pytest.approx(0, abs=1e-9)
    assert wrong_too or not added[~right].any()
    for i in np.flatnonzero(right):
        for j in np.flatnonzero(~right):
            lead = rewards[i] - rewards[j]
            if lead > 0:
                assert lead + added[i] - added[j] >= _KEPT_LEAD * lead - 1e-9
    for members in (right, ~right):  # a shorter completion never gets less
        order = np.argsort(tokens[members])
        assert (np.diff(added[members][order]) <= 1e-9).all()


@given(GROUP, DAPO, st.booleans())
def test_overlong_is_dapos_up_to_a_constant(
    group: list[tuple[float, int, float]], rule: LengthRule, may_outweigh: bool
) -> None:
    rule = replace(rule, may_outweigh=may_outweigh)
    rewards, correct, tokens = arrays(group)
    added = rule.adjustment(rewards, correct, tokens)
    dapo = rule.overlong * np.array([_dapo(n, rule.limit, rule.margin) for n in tokens])
    ours, theirs = added - added[0], dapo - dapo[0]
    spread = np.abs(theirs).max()
    factor = np.abs(ours).max() / spread if spread > 1e-9 else 1.0
    np.testing.assert_allclose(ours, factor * theirs, atol=1e-9)
    assert factor <= 1 + 1e-9
    right = correct >= rule.correct_threshold
    leads = rewards[right][:, None] - rewards[~right][None, :]
    adjusted = leads + added[right][:, None] - added[~right][None, :]
    if may_outweigh or not (leads > 0).any():
        assert factor == pytest.approx(1)
    else:
        assert (adjusted[leads > 0] >= _KEPT_LEAD * leads[leads > 0] - 1e-9).all()


def _dapo(tokens: int, limit: int, cache: int) -> float:
    """R_length of DAPO (arXiv 2503.14476), Eq. 13: 0 … −1."""
    if tokens <= limit - cache:
        return 0.0
    return (limit - cache - tokens) / cache if tokens <= limit else -1.0


def test_costs_by_length() -> None:
    linear = rule(linear=0.2, target=200).penalty(np.array([0, 200, 600, 1000]))
    np.testing.assert_allclose(linear, [0, 0, 0.1, 0.2])
    overlong = rule(overlong=1.0).penalty(np.array([100, 800, 900, 1000, 5000]))
    np.testing.assert_allclose(overlong, [0, 0, 0.5, 1, 1])


@pytest.mark.parametrize(
    ("knobs", "correct", "tokens", "added"),
    [
        ({"overlong": 0.3}, [1, 0, 0], [300, 300, 1000], [0.1, 0.1, -0.2]),
        ({"overlong": 0.3}, [0, 0], [300, 1000], [0.15, -0.15]),
        ({"overlong": 0.3, "overlong_charges": "right"}, [1, 0, 0], [300, 300, 1000], [0, 0, 0]),
        ({"linear": 0.3}, [1, 0, 0], [300, 300, 1000], [0, 0, 0]),
        ({"linear": 0.2}, [1, 1, 0, 0], [200, 600, 10, 900], [0.04, -0.04, 0, 0]),
        (
            *({"linear": 0.2, "wrong_too": True}, [1, 1, 0, 0], [200, 600, 100, 900]),
            [0.04, -0.04, 0.08, -0.08],
        ),
        ({"linear": 0.2}, [0.8, 0.9], [0, 1000], [0, 0]),
        ({"linear": 0.2, "correct_threshold": 0.7}, [0.8, 0.9], [0, 1000], [0.1, -0.1]),
    ],
)
def test_who_is_compared_with_whom(
    knobs: dict[str, Any], correct: list[float], tokens: list[int], added: list[float]
) -> None:
    assert adjust(rule(**knobs), correct, tokens) == pytest.approx(added)


def test_equal_lengths_change_no_bit() -> None:
    for tokens in (7, 333, 999):
        group = adjust(rule(linear=0.1, overlong=0.7, wrong_too=True), [1, 0, 1, 0], [tokens] * 4)
        assert group == [0.0] * 4


def test_only_may_outweigh_turns_leads_over() -> None:
    correct, tokens = [1.0, 1.0, 0.0], [1000, 0, 0]
    added = adjust(rule(linear=4.0), correct, tokens)
    assert 1 + added[0] == pytest.approx(_KEPT_LEAD)
    assert added[2] == 0.0
    added = adjust(rule(linear=4.0, may_outweigh=True), correct, tokens)
    assert sum(added) == pytest.approx(0)
    assert 1 + added[0] < added[2]
