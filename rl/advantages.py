"""Group-relative advantages."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from keel.rl.checks import require, require_rows

Scale = Literal["none", "std"]
_ROUNDING_ULP = 4
"""Rewards count as equal if they differ by at most this many units in the last place of the largest
reward in the group."""


def group_advantages(rewards: Tensor, *, scale: Scale = "none") -> Tensor:
    r"""Â_i = R_i − mean(R) within each group. DeepSeek-V3.2 (2025), text under Eq. 6.

    Shapes: `rewards` [..., G], one group in the last axis; returns the same shape and dtype. The
    advantages of a group are exactly 0 if its rewards differ by no more than the rounding of sums
    (0.1 + 0.2 and 0.3).

    `scale="std"` divides by the group's standard deviation (with Bessel's correction), as the
    original GRPO (DeepSeekMath, 2024). A group without spread keeps its zeros; division would turn
    rounding errors into full-size advantages.

    Raises `ValueError` for rewards without a group axis, of an integer dtype, or not finite (CPU
    only), and for an unknown `scale`.
    """
    require(
        rewards.ndim >= 1 and rewards.shape[-1] >= 1,
        f"rewards has shape {list(rewards.shape)}: must be [..., G] with G >= 1",
    )
    require(rewards.is_floating_point(), f"rewards is {rewards.dtype}: must be floating point")
    require(scale in ("none", "std"), f"scale = {scale!r}: must be 'none' or 'std'")
    require_rows("rewards", rewards, rewards.isfinite(), "must be finite")

    # Relative to the first sibling, so that equal rewards give exact zeros despite a rounded mean.
    above_first = rewards - rewards[..., :1]
    spread, largest = (x.abs().amax(-1, keepdim=True) for x in (above_first, rewards))
    equal = spread <= _ROUNDING_ULP * torch.finfo(rewards.dtype).eps * largest
    above_first = torch.where(equal, 0.0, above_first)
    advantages = above_first - above_first.mean(-1, keepdim=True)
    if scale == "none" or rewards.shape[-1] == 1:
        return advantages
    std = above_first.std(-1, keepdim=True)
    return torch.where(std > 0, advantages / torch.where(std > 0, std, 1.0), 0.0)
