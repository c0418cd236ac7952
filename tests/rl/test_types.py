"""The types that flow between the stages refuse what does not fit, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.rl.types import SamplingMasks, ScoredGroup
from tests.rl.rollouts import prompt, scored, segment, trajectory

SPANS = st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=6)


@settings(deadline=None, max_examples=20)
@given(SPANS, SPANS, st.data())
def test_sampling_masks_behave_like_lists_of_spans(first, second, data) -> None:
    a, b = SamplingMasks.from_lists(first), SamplingMasks.from_lists(second)
    both = SamplingMasks.concat([a, b])
    spans = first + second
    assert [both[t].tolist() for t in range(len(both))] == spans
    assert both.sizes().tolist() == [len(span) for span in spans]
    stop = data.draw(st.integers(0, len(spans)))
    start = data.draw(st.integers(0, stop))
    cut = both.slice(start, stop)
    assert [cut[t].tolist() for t in range(len(cut))] == spans[start:stop]


def test_empty_kept_sets() -> None:
    assert SamplingMasks.empty(3).sizes().tolist() == [0, 0, 0]
    assert len(SamplingMasks.concat([])) == 0


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 1], r"offsets must run from 0 to len\(ids\) = 2"),
        ([1, 2], "offsets must run from 0"),
        ([], "offsets must run from 0"),
        ([[0, 2]], "offsets must run from 0"),
        ([0, 2, 1, 2], "offsets must not decrease"),
    ],
)
def test_sampling_masks_police_their_offsets(offsets: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingMasks(ids=np.zeros(2, np.int32), offsets=np.asarray(offsets, np.int64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version_T": np.zeros(3, np.int32)}, "version_T has 3 entries for 4 tokens"),
        ({"sampling_mask": SamplingMasks.empty(5)}, "sampling_mask has 5 entries for 4 tokens"),
        ({"routes_TLK": np.zeros((4, 2), np.int16)}, r"routes_TLK must be \[T, L, K\]"),
        ({"trainable_T": np.ones(4, np.bool_)}, "first token has nothing before it"),
        ({"logp_old_T": np.full(4, -np.inf, np.float32)}, "logp_old_T .* finite and <= 0"),
        ({"logp_old_T": np.full(4, 0.5, np.float32)}, "logp_old_T .* finite and <= 0"),
    ],
)
def test_a_segment_names_its_prompt(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"segment of q: .*{message}"):
        replace(segment(name="q"), **change)


def test_prompts_and_trajectories_refuse_nothing_to_do() -> None:
    with pytest.raises(ValueError, match="prompt q: messages is empty"):
        prompt("q", messages=())
    for kl_coef in (-0.1, float("nan")):
        with pytest.raises(ValueError, match=r"prompt q: kl_coef is .*must be >= 0"):
            prompt("q", kl_coef=kl_coef)
    with pytest.raises(ValueError, match="trajectory q/3: no sampled token"):
        trajectory(segment(name="q", context=4), sibling=3)


def test_a_trajectory_counts_over_its_segments() -> None:
    both = trajectory(segment(0, 4, context=2), segment(9, 3, context=1))
    assert (both.sampled_tokens, both.total_tokens) == (4, 7)


def test_a_scored_group_fits_its_group() -> None:
    group = scored([trajectory(segment(name="q"))], [1.0])
    with pytest.raises(ValueError, match="group of q: rewards_G has 2 entries for 1"):
        replace(group, rewards_G=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="group of q: advantages_G must be finite"):
        replace(group, advantages_G=np.full(1, np.nan, np.float32))


@pytest.mark.parametrize(("rewards", "uniform"), [([1, 1], True), ([0, 1], False), ([], False)])
def test_uniform_groups(rewards: list[float], uniform: bool) -> None:
    group: ScoredGroup = scored(
        [trajectory(segment(), sibling=i) for i in range(len(rewards))], rewards
    )
    assert group.uniform == uniform
