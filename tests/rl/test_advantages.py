"""Group advantages: definition, exact zeros, scaling."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.rl.advantages import group_advantages
from tests.rl.reference_grpo import advantages

REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=8)


@given(REWARDS)
def test_advantages_match_the_definition(rewards: list[float]) -> None:
    actual = group_advantages(torch.tensor(rewards, dtype=torch.float64))
    torch.testing.assert_close(actual, torch.tensor(advantages(rewards), dtype=torch.float64))
    assert actual.sum().abs() < 1e-12


@given(st.floats(-10, 10, width=32), st.integers(1, 9), st.sampled_from(["none", "std"]))
def test_equal_rewards_give_exact_zeros(reward, size, scale) -> None:
    for dtype in (torch.float32, torch.float64):
        rewards = torch.full((size,), reward, dtype=dtype)
        assert group_advantages(rewards, scale=scale).tolist() == [0.0] * size


@pytest.mark.parametrize("scale", ["none", "std"])
def test_rounding_differences_count_as_equal(scale) -> None:
    parts = torch.tensor([0.1, 0.7, 0.2, 0.4])
    reordered = torch.stack([parts.sum(), (parts[3] + parts[2]) + (parts[0] + parts[1])])
    other = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    for rewards in (reordered, other, -other):
        assert len(set(rewards.tolist())) == 2
        assert not group_advantages(rewards, scale=scale).any()
    together = torch.stack([other, torch.tensor([0.3, 0.3, 0.3 + 1e-9], dtype=torch.float64)])
    actual = group_advantages(together, scale=scale)
    assert not actual[0].any() and actual[1].all()


def test_groups_do_not_mix() -> None:
    rewards = torch.tensor([[[1.0, 0.0], [5.0, 5.0]], [[2.0, 4.0], [0.0, 8.0]]])
    expected = torch.tensor([[[0.5, -0.5], [0.0, 0.0]], [[-1.0, 1.0], [-4.0, 4.0]]])
    torch.testing.assert_close(group_advantages(rewards), expected)


def test_scale() -> None:
    rewards = torch.tensor([0.0, 10.0, 20.0])
    assert group_advantages(rewards).tolist() == [-10.0, 0.0, 10.0]
    assert group_advantages(rewards, scale="std").tolist() == [-1.0, 0.0, 1.0]
    mixed = torch.tensor([[3.0, 3.0, 3.0], [0.0, 1.0, 2.0]])
    assert group_advantages(mixed, scale="std").tolist() == [[0.0, 0.0, 0.0], [-1.0, 0.0, 1.0]]


def test_invalid_rewards_are_named() -> None:
    unknown = torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])
    for rewards in (torch.tensor(1.0), torch.zeros(3, 0), torch.tensor([1, 0]), unknown):
        with pytest.raises(ValueError, match="rewards"):
            group_advantages(rewards)
    with pytest.raises(ValueError, match="scale"):
        group_advantages(unknown[:1], scale="variance")
