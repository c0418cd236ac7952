"""The types that flow between the stages validate themselves."""

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
    assert SamplingMasks.empty(3).sizes().tolist() == [0, 0, 0]
    assert len(SamplingMasks.concat([])) == 0


@pytest.mark.parametrize("offsets", [[0, 1], [1, 2], [], [[0, 2]], [0, 2, 1, 2]])
def test_sampling_masks_validate_their_offsets(offsets: list[Any]) -> None:
    with pytest.raises(ValueError, match="offsets"):
        SamplingMasks(ids=np.zeros(2, np.int32), offsets=np.asarray(offsets, np.int64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version_T": np.zeros(3, np.int32)}, "version_T"),
        ({"sampling_mask": SamplingMasks.empty(5)}, "sampling_mask"),
        ({"routes_TLK": np.zeros((4, 2), np.int16)}, "routes_TLK"),
        ({"trainable_T": np.ones(4, np.bool_)}, "trainable"),
        ({"logp_old_T": np.full(4, -np.inf, np.float32)}, "logp_old_T"),
        ({"logp_old_T": np.full(4, 0.5, np.float32)}, "logp_old_T"),
    ],
)
def test_invalid_segments_name_prompt_and_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"segment of q: .*{message}"):
        replace(segment(name="q"), **change)


def test_invalid_prompts_and_trajectories_are_named() -> None:
    with pytest.raises(ValueError, match="prompt q: messages"):
        prompt("q", messages=())
    for kl_coef in (-0.1, float("nan")):
        with pytest.raises(ValueError, match=r"prompt q: kl_coef"):
            prompt("q", kl_coef=kl_coef)
    with pytest.raises(ValueError, match="trajectory q/3"):
        trajectory(segment(name="q", context=4), sibling=3)


def test_invalid_scored_groups_name_the_field() -> None:
    group = scored([trajectory(segment(name="q"))], [1.0])
    with pytest.raises(ValueError, match="group of q: rewards_G"):
        replace(group, rewards_G=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="group of q: advantages_G"):
        replace(group, advantages_G=np.full(1, np.nan, np.float32))


@pytest.mark.parametrize(("rewards", "uniform"), [([1, 1], True), ([0, 1], False), ([], False)])
def test_uniform_groups(rewards: list[float], uniform: bool) -> None:
    group: ScoredGroup = scored(
        [trajectory(segment(), sibling=i) for i in range(len(rewards))], rewards
    )
    assert group.uniform == uniform
