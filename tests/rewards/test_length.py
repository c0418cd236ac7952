"""Laws of the length rule: it moves nothing between right and wrong, and never turns them over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.configs.schema import ConfigError, DataConfig, LengthConfig, SourceConfig
from keel.rewards.length import KEPT_LEAD, LengthRule

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


@settings(max_examples=40, deadline=None)
@given(GROUP, RULE, st.booleans())
def test_each_class_keeps_its_mean_and_every_lead_its_sign(
    group: list[tuple[float, int, float]], rule: LengthRule, wrong_too: bool
) -> None:
    rule = LengthRule(**{**_fields(rule), "wrong_too": wrong_too, "overlong_charges": "right"})
    correct = np.array([c for c, _, _ in group])
    tokens = np.array([n for _, n, _ in group])
    rewards = correct + np.array([e for _, _, e in group])
    added = rule.adjustment(rewards, correct, tokens)
    right = correct >= rule.correct_threshold
    assert added[right].sum() == pytest.approx(0, abs=1e-9)
    assert added[~right].sum() == pytest.approx(0, abs=1e-9)
    assert wrong_too or not added[~right].any()
    for i in np.flatnonzero(right):
        for j in np.flatnonzero(~right):
            lead = rewards[i] - rewards[j]
            if lead > 0:
                assert lead + added[i] - added[j] >= KEPT_LEAD * lead - 1e-9
    # Inside a class the shorter never gets less.
    for members in (right, ~right):
        order = np.argsort(tokens[members])
        assert (np.diff(added[members][order]) <= 1e-9).all()


@settings(max_examples=40, deadline=None)
@given(GROUP, DAPO, st.booleans())
def test_overlong_is_what_dapo_takes_by_length_alone_up_to_a_constant_and_a_factor(
    group: list[tuple[float, int, float]], rule: LengthRule, may_outweigh: bool
) -> None:
    rule = LengthRule(**{**_fields(rule), "may_outweigh": may_outweigh})
    correct = np.array([c for c, _, _ in group])
    tokens = np.array([n for _, n, _ in group])
    rewards = correct + np.array([e for _, _, e in group])
    added = rule.adjustment(rewards, correct, tokens)
    dapo = rule.overlong * np.array([_punished(n, rule.limit, rule.margin) for n in tokens])
    ours, theirs = added - added[0], dapo - dapo[0]
    spread = np.abs(theirs).max()
    factor = np.abs(ours).max() / spread if spread > 1e-9 else 1.0
    np.testing.assert_allclose(ours, factor * theirs, atol=1e-9)
    assert factor <= 1 + 1e-9
    right = correct >= rule.correct_threshold
    leads = rewards[right][:, None] - rewards[~right][None, :]
    now = leads + added[right][:, None] - added[~right][None, :]
    if may_outweigh or not (leads > 0).any():
        assert factor == pytest.approx(1)
    else:
        assert (now[leads > 0] >= KEPT_LEAD * leads[leads > 0] - 1e-9).all()


def _punished(tokens: int, limit: int, cache: int) -> float:
    """R_length of DAPO (arXiv 2503.14476), Eq. 13, case by case: 0 … −1."""
    if tokens <= limit - cache:
        return 0.0
    if tokens <= limit:
        return (limit - cache - tokens) / cache
    return -1.0


def test_a_wrong_answer_that_was_cut_off_loses_to_one_that_ended_unless_told_otherwise() -> None:
    correct, tokens = [1.0, 0.0, 0.0], [300, 300, 1000]
    added = adjust(rule(overlong=0.3), correct, tokens)
    assert added == pytest.approx([0.1, 0.1, -0.2])
    assert adjust(rule(overlong=0.3), [0.0, 0.0], [300, 1000]) == pytest.approx([0.15, -0.15])
    assert adjust(rule(overlong=0.3, overlong_charges="right"), correct, tokens) == [0.0] * 3
    # What is paid along the way stays a matter among the right ones.
    assert adjust(rule(linear=0.3), correct, tokens) == [0.0] * 3


def _fields(rule: LengthRule) -> dict[str, Any]:
    return {name: getattr(rule, name) for name in LengthRule.__dataclass_fields__}


def test_linear_in_tokens_above_the_target() -> None:
    cost = rule(linear=0.2, target=200).cost(np.array([0, 200, 600, 1000]))
    np.testing.assert_allclose(cost, [0, 0, 0.1, 0.2])


def test_soft_overlong_as_in_dapo() -> None:
    cost = rule(overlong=1.0).cost(np.array([100, 800, 900, 1000, 5000]))
    np.testing.assert_allclose(cost, [0, 0, 0.5, 1, 1])


def test_siblings_of_one_length_are_left_alone_to_the_last_bit() -> None:
    for tokens in (7, 333, 999):
        group = adjust(rule(linear=0.1, overlong=0.7, wrong_too=True), [1, 0, 1, 0], [tokens] * 4)
        assert group == [0.0] * 4


def test_right_answers_are_compared_with_right_ones() -> None:
    added = adjust(rule(linear=0.2), [1, 1, 0, 0], [200, 600, 10, 900])
    assert added == pytest.approx([0.04, -0.04, 0, 0])
    both = adjust(rule(linear=0.2, wrong_too=True), [1, 1, 0, 0], [200, 600, 100, 900])
    assert both == pytest.approx([0.04, -0.04, 0.08, -0.08])


def test_a_short_wrong_answer_beats_a_long_right_one_only_if_asked_for() -> None:
    correct, tokens = [1.0, 1.0, 0.0], [1000, 0, 0]
    added = adjust(rule(linear=4.0), correct, tokens)
    assert 1 + added[0] == pytest.approx(KEPT_LEAD)
    assert added[2] == 0.0
    added = adjust(rule(linear=4.0, may_outweigh=True), correct, tokens)
    assert sum(added) == pytest.approx(0)
    assert 1 + added[0] < added[2]


def test_where_wrong_is_ahead_already_length_goes_on_as_usual() -> None:
    # The recipe weighs something else higher than `correct`: that is not the length's to mend.
    added = adjust(rule(linear=0.2), [1, 1, 0], [0, 1000, 0], rewards=[0.1, 0.1, 0.5])
    assert added == pytest.approx([0.1, -0.1, 0])


def test_a_rubric_says_from_where_on_an_answer_is_right() -> None:
    assert not any(adjust(rule(linear=0.2), [0.8, 0.9], [0, 1000]))
    assert adjust(rule(linear=0.2, correct_threshold=0.7), [0.8, 0.9], [0, 1000]) == pytest.approx(
        [0.1, -0.1]
    )


def test_knobs() -> None:
    assert LengthRule.from_knobs(_knobs(linear=0.1), limit=500) == LengthRule(
        linear=0.1, limit=500, margin=100
    )
    with pytest.raises(ValueError, match=r"length\.target = 500 .* below limit = 500"):
        LengthRule.from_knobs(_knobs(target=500), limit=500)
    with pytest.raises(ValueError, match=r"length\.margin = 600"):
        LengthRule.from_knobs(_knobs(margin=600), limit=500)
    with pytest.raises(ConfigError, match=r"length\.linear = -1"):
        LengthConfig(linear=-1)
    one = SourceConfig(name="a", source="jsonl", path="a", domain="d")
    two = SourceConfig(
        name="b", source="jsonl", path="b", domain="d", length=LengthConfig(linear=0.1)
    )
    with pytest.raises(ConfigError, match=r"sources\[b\]\.length.*domain 'd' has another"):
        DataConfig(sources=(one, two))


def _knobs(**changes: Any) -> dict[str, Any]:
    config = LengthConfig(**changes)
    return {name: getattr(config, name) for name in LengthConfig.__dataclass_fields__}
