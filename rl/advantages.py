"""How much better a completion is than its siblings."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from keel.rl.checks import require, require_rows

Scale = Literal["none", "std"]
ROUNDING = 4
"""Units in the last place of a group's largest reward: rewards no further apart are equal."""


def group_advantages(rewards: Tensor, *, scale: Scale = "none") -> Tensor:
    r"""Â_i = R_i − mean(R), inside each group. DeepSeek-V3.2 (2025), text under Eq. 6.

    Shapes: `rewards` [..., G], one group in the last axis; returns the same shape and dtype. A
    group of equal rewards has advantages of exactly 0, and so has one whose rewards differ by the
    rounding of sums alone (0.1 + 0.2 and 0.3).

    `scale="std"` divides by the group's standard deviation (with Bessel's correction), as GRPO
    first did (DeepSeekMath, 2024); a group without spread keeps its zeros. Divided by its own size,
    rounding would be as large as any advantage.

    Raises `ValueError` for rewards without a group axis, of a dtype without fractions, or not
    finite (checked on the CPU), and for an unknown `scale`.
    """
    require(
        rewards.ndim >= 1 and rewards.shape[-1] >= 1,
        f"rewards has shape {list(rewards.shape)}: must be [..., G] with G >= 1",
    )
    require(rewards.is_floating_point(), f"rewards is {rewards.dtype}: must be floating point")
    require(scale in ("none", "std"), f"scale = {scale!r}: must be 'none' or 'std'")
    require_rows("rewards", rewards, rewards.isfinite(), "must be finite")

    # Counted from the first sibling: equal rewards then differ by 0, not by rounding of their mean.
    above_first = rewards - rewards[..., :1]
    spread, largest = (x.abs().amax(-1, keepdim=True) for x in (above_first, rewards))
    equal = spread <= ROUNDING * torch.finfo(rewards.dtype).eps * largest
    above_first = torch.where(equal, 0.0, above_first)
    advantages = above_first - above_first.mean(-1, keepdim=True)
    if scale == "none" or rewards.shape[-1] == 1:
        return advantages
    std = above_first.std(-1, keepdim=True)
    return torch.where(std > 0, advantages / torch.where(std > 0, std, 1.0), 0.0)
