"""GRPO and the four stabilisers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from keel.configs.sections.base import ConfigError, require
from keel.configs.sections.rollout import SamplingConfig

PROBES = 64
"""Tokens of a completion or turn whose masks `algorithm.kept_mass_coef` looks at, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """GRPO and the four stabilisers (DeepSeek-V3.2, section 3.1)."""

    prompts_per_step: int = 16
    """Prompts, and so groups, of one batch of rollouts."""
    group_size: int = 8
    """G: completions per prompt."""
    scale_advantages: Literal["none", "std"] = "none"
    """none: an advantage is the reward minus the group's mean. std: that, divided by the standard
    deviation of the group's rewards."""
    clip_low: float = 0.2
    """The probability ratio is clipped below at 1 − clip_low."""
    clip_high: float = 0.2
    """The probability ratio is clipped above at 1 + clip_high."""
    kl: Literal["unbiased_k3", "k3"] = "unbiased_k3"
    """The coefficient β belongs to each data source: `data.sources[].kl_coef`."""
    mask_delta: float | None = 0.2
    """δ of the off-policy sequence mask (Eq. 9), in nats per token; null: off. The default is above
    what rounding to bfloat16 alone makes of completions of 64 tokens and more: at most 0.17, on a
    model made to show it (docs/stability.md). `mask/logp_gap_max` is the largest in a step."""
    keep_routing: bool = True
    """Replay the engine's recorded experts in the trainer. Required for a MoE model."""
    keep_sampling_mask: bool = True
    """Score each token over the sampling mask it was sampled from (the ids that top-p and top-k
    kept). Required with truncated sampling."""
    kept_mass_coef: float = 0.0
    """Weight of a penalty on what the policy moves out of the sampling masks, which no probability
    ratio shows: the mean over tokens of how far, in nats, the mask's mass lies below the square of
    `rollout.sampling.top_p` (docs/stability.md). 0: none, as in the paper. 1 where completions are
    many optimizer steps old (`publish_every`, `max_lag`, `updates_per_batch`); of fresh ones it is
    next to nothing. It looks at up to 64 tokens of each context, and at masks of at most a quarter
    of `rollout.sampling.top_k`, which that has not cut. Needs top_p below 1."""
    ref_routing: Literal["live", "replay"] = "live"
    """Routing of the reference policy: its own, or the recorded one."""
    updates_per_batch: int = 1
    """Optimizer steps on each batch of rollouts."""
    max_lag: int = 0
    """Batches that the engines may sample ahead while the trainer works. 0: they wait for new
    weights, so that each batch is sampled from the policy it trains. Groups train in the order of
    their prompts, however long they take: no token is from weights older than this allows, and none
    is dropped for it (`staleness/max`)."""
    filter_groups: Literal["none", "reward", "correct"] = "none"
    """Leave out groups that teach nothing and sample another prompt instead: those whose rewards
    are all equal, or whose `correct` parts are (all right, or all wrong). Their KL term goes with
    them."""
    max_refills: float = 2.0
    """The most prompts sampled instead of filtered groups for one batch, as a multiple of
    `prompts_per_step`. After that, groups are taken as they come."""
    publish_every: int = 1
    """Steps between new weights for the engines (they also get them before an evaluation). Above 1,
    completions come from older weights: `staleness/mean` counts the optimizer steps."""
    skip_uniform_groups: bool = True
    """Leave groups whose advantages are all zero (and β = 0) out of the trainer's work. They still
    count in every denominator, so the gradient is the same, but for what `kept_mass_coef` and the
    indexers of sparse attention have of them, which goes."""
    allow_unsound: bool = False
    """Run without a replay that the recipe needs. For experiments that show why it is needed; never
    for training."""

    def __post_init__(self) -> None:
        require(
            self.publish_every >= 1,
            "algorithm.publish_every",
            self.publish_every,
            "must be at least 1",
        )
        require(
            self.prompts_per_step >= 1,
            "algorithm.prompts_per_step",
            self.prompts_per_step,
            "must be at least 1",
        )
        require(
            self.group_size >= 2,
            "algorithm.group_size",
            self.group_size,
            "must be at least 2: a completion is compared with its siblings, and alone has an "
            "advantage of 0",
        )
        for name in ("max_lag", "max_refills", "kept_mass_coef"):
            value = getattr(self, name)
            require(value >= 0, f"algorithm.{name}", value, "must not be negative")
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            require(value > 0, f"algorithm.{name}", value, "must be > 0")
        require(self.clip_low < 1, "algorithm.clip_low", self.clip_low, "must be below 1")
        require(
            self.mask_delta is None or self.mask_delta > 0,
            "algorithm.mask_delta",
            self.mask_delta,
            "must be positive, or null to switch the sequence mask off",
        )
        require(
            1 <= self.updates_per_batch <= self.prompts_per_step,
            "algorithm.updates_per_batch",
            self.updates_per_batch,
            f"must be between 1 and algorithm.prompts_per_step = {self.prompts_per_step}",
        )
        require(
            math.isfinite(self.kept_mass_coef),
            "algorithm.kept_mass_coef",
            self.kept_mass_coef,
            "must be finite",
        )

    @property
    def probes(self) -> int:
        """Tokens of a completion or turn whose mask's mass the trainer computes, at most; one is
        for the metric alone."""
        return PROBES if self.kept_mass_coef > 0 else 1

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raises `ConfigError` where tokens that are sampled like this cannot be trained on."""
        drawn = f"rollout.sampling.top_p = {sampling.top_p}, top_k = {sampling.top_k}"
        if sampling.truncated and not self.keep_sampling_mask and not self.allow_unsound:
            raise ConfigError(
                f"algorithm.keep_sampling_mask = False: sampling is truncated ({drawn}), so "
                "without the sampling masks every probability ratio is wrong. Switch it on, or "
                "sample with top_p: 1 and top_k: 0"
            )
        require(
            self.kept_mass_coef == 0 or (sampling.top_p < 1 and self.keep_sampling_mask),
            "algorithm.kept_mass_coef",
            self.kept_mass_coef,
            "is about sampling masks that hold top_p or more: needs rollout.sampling.top_p below 1 "
            f"({drawn}) and algorithm.keep_sampling_mask ({self.keep_sampling_mask}); or set it "
            "to 0",
        )
