"""Compute group-relative advantages."""

from typing import Literal

import torch
from torch import Tensor

from keel.rl.checks import require, require_rows

Scale = Literal["none", "std"]
_ROUNDING_ULP = 4
"""Rewards in a group count as equal if they differ by at most this many units in the last place of
the largest reward."""


def group_advantages(rewards: Tensor, *, scale: Scale = "none") -> Tensor:
    """Compute advantages Â_i = R_i − mean(R) within each group (DeepSeek-V3.2, 2025, under Eq. 6).

    `rewards` has shape [..., G], with each group along the last axis. The result has the same shape
    and dtype. If the rewards in a group differ only by rounding error (like 0.1 + 0.2 and 0.3), its
    advantages are exactly 0.

    With `scale="std"`, advantages are divided by the group's standard deviation (with Bessel's
    correction), as in the original GRPO (DeepSeekMath, 2024). Advantages of 0 stay 0, because
    dividing would blow rounding errors up into large advantages.

    Raises `ValueError` if rewards have no group axis, have an integer dtype or aren't finite
    (checked on the CPU only), or if `scale` is unknown.
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
