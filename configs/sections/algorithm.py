"""`algorithm`: GRPO and the four stabilisers."""

from dataclasses import dataclass
from typing import Literal

from keel.configs.sections.base import ConfigError, Section, knob, require
from keel.configs.sections.rollout import SamplingConfig

_PROBES = 64
"""Maximum number of tokens per completion or turn at which the probability mass of the sampling
masks is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig(Section, path="algorithm"):
    """Settings for GRPO and its four stabilizers (DeepSeek-V3.2, section 3.1)."""

    prompts_per_step: int = knob(16, ge=1)
    """Number of prompts per batch of rollouts. Each prompt gives one group."""
    group_size: int = knob(8, ge=1)
    """Number of completions per prompt (G). Each completion is compared with the others in its
    group, so 1 is for sources without rewards (on-policy distillation)."""
    scale_advantages: Literal["none", "std"] = "none"
    """none: the advantage is the reward minus the group mean. std: also divide by the standard
    deviation of the group's rewards."""
    clip_low: float = knob(0.2, gt=0, lt=1)
    """Lower clipping of the probability ratio, at 1 − clip_low."""
    clip_high: float = knob(0.2, gt=0)
    """Upper clipping of the probability ratio, at 1 + clip_high."""
    kl: Literal["unbiased_k3", "k3"] = "unbiased_k3"
    """KL estimator. Its coefficient β is set per source: `data.sources[].kl_coef`."""
    mask_delta: float | None = knob(0.2, gt=0)
    """δ of the off-policy sequence mask (Eq. 9), in nats per token. null: off. The default is above
    what bfloat16 rounding alone causes on completions of 64 or more tokens (at most 0.17 on a model
    built to show it, docs/stability.md). `mask/logp_gap_max` is the maximum in a step."""
    keep_selection: bool = False
    """Replay the selections of the engines' sparse attention in the trainer (DeepSeek-V3.2).
    Experimental. The recordings take T / 8 bytes per layer and token at contexts of T tokens, on
    the engine's GPU and in each trajectory (docs/sparse-attention.md)."""
    keep_routing: bool = True
    """Replay the engine's recorded experts in the trainer. Required for MoE models."""
    keep_sampling_mask: bool = True
    """Score each token over the sampling mask it was drawn from (the ids that top-p and top-k
    kept). Required with truncated sampling."""
    kept_mass_coef: float = knob(0.0, ge=0, le=1_000_000)
    """Weight of a penalty on probability mass that leaves the sampling masks, which no probability
    ratio shows: the mean over tokens of how far, in nats, the mass of the mask is below the square
    of `rollout.sampling.top_p` (docs/stability.md). 0: off, as in the paper. Use 1 if completions
    are many optimizer steps old (`publish_every`, `max_lag`, `updates_per_batch`). Needs top_p
    below 1. It samples up to 64 tokens per context and ignores masks of more than a quarter of
    `rollout.sampling.top_k`."""
    ref_routing: Literal["live", "replay"] = "live"
    """Experts of the reference policy: its own, or the recorded ones."""
    updates_per_batch: int = knob(1, ge=1)
    """Number of optimizer steps per batch of rollouts; at most `prompts_per_step`."""
    max_lag: int = knob(0, ge=0)
    """Number of batches that engines may sample ahead while the trainer works. 0: engines wait for
    new weights, so every batch is on-policy if `publish_every` and `updates_per_batch` are 1.
    Groups train in prompt order however long they take, so no token is older than this allows and
    none is dropped for its age (`staleness/max`)."""
    filter_groups: Literal["none", "reward", "correct"] = "none"
    """Replace groups that carry no signal by sampling further prompts. reward: groups with equal
    rewards. correct: groups whose `correct` parts are equal. Their KL term is dropped with them."""
    max_refills: float = knob(2.0, ge=0)
    """Maximum number of prompts sampled per batch to replace filtered groups, as a multiple of
    `prompts_per_step`. Once it is reached, groups are no longer filtered."""
    publish_every: int = knob(1, ge=1)
    """Number of steps between weight updates of the engines. The engines are also updated before
    each evaluation. Above 1, completions come from older weights, and `staleness/mean` counts by
    how many optimizer steps."""
    skip_uniform_groups: bool = True
    """Leave groups whose advantages are all zero (and β = 0) out of the trainer. They still count
    in every denominator, so the gradient is unchanged, except for their share in `kept_mass_coef`
    and in the indexer loss for sparse attention."""
    allow_unsound: bool = False
    """Allow a run without a replay that the recipe needs. Use it only for experiments that show why
    the replay is needed."""

    def check(self) -> None:
        most = self.prompts_per_step
        rule = f"must be at most algorithm.prompts_per_step = {most}"
        self.require(self.updates_per_batch <= most, "updates_per_batch", rule)

    @property
    def probes(self) -> int:
        """Maximum number of tokens per completion or turn for which the sampling mask's probability
        mass is computed. One token is enough if only the metric needs it (`kept_mass_coef: 0`)."""
        return _PROBES if self.kept_mass_coef > 0 else 1

    def check_sampling(self, sampling: SamplingConfig) -> None:
        drawn = f"rollout.sampling.top_p = {sampling.top_p}, top_k = {sampling.top_k}"
        if sampling.truncated and not self.keep_sampling_mask and not self.allow_unsound:
            raise ConfigError(
                f"algorithm.keep_sampling_mask = False: sampling is truncated ({drawn}), so "
                "probability ratios need the sampling masks. Switch it on, or sample with top_p: 1 "
                "and top_k: 0"
            )
        rule = "must not be 1: greedy completions carry no gradient"
        require(sampling.top_k != 1, "rollout.sampling.top_k", sampling.top_k, rule)
        require(
            self.kept_mass_coef == 0 or (sampling.top_p < 1 and self.keep_sampling_mask),
            "algorithm.kept_mass_coef",
            self.kept_mass_coef,
            f"needs rollout.sampling.top_p below 1 ({drawn}) and algorithm.keep_sampling_mask "
            f"({self.keep_sampling_mask}). Otherwise set it to 0",
        )
