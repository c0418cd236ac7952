"""Metrics of rewards, of the loss, and of engine against trainer."""

from __future__ import annotations

from keel.commands.reference.metric import Metric

LEARNING: dict[str, tuple[Metric, ...]] = {
    "Held-out sets": (
        Metric(
            "eval/<set>/pass@1",
            "share, 0 to 1",
            "Completions to the set's prompts that are wholly right; missing ones count as wrong.",
            "rises with `reward/mean`",
            "evaluation",
        ),
        Metric(
            "eval/<set>/score",
            "0 to 1",
            "Mean of `correct`, partial credit included, over completions that were scored; what a "
            "verifier failed at has 0.",
            page="evaluation",
        ),
        Metric(
            "eval/<set>/unscored",
            "completions",
            "Those that are missing or could not be scored: wrong in `pass@1` without being known "
            "to be.",
            "0",
            "evaluation",
        ),
        Metric(
            "eval/<set>/loss",
            "nats per token",
            "`keel sft`, `keel pretrain`: loss of a held-out set.",
            "falls; rises again where conversations are learned by heart",
            "sft",
        ),
        Metric(
            "eval/loss", "nats per token", "The same over the tokens of all held-out sets.", page=""
        ),
        Metric(
            "eval/<set>/indexer/held",
            "share, 0 to 1",
            "Warm-up of indexers: dense attention that their top k hold, on a held-out set.",
            "rises until the warm-up is done",
            "pretrain",
        ),
        Metric(
            "eval/indexer/held",
            "share, 0 to 1",
            "The same over all held-out sets.",
            page="pretrain",
        ),
    ),
    "Rewards": (
        Metric(
            "reward/mean",
            "reward",
            "Mean reward of all that was sampled for the step, groups that the filter discarded "
            "included.",
            "rises",
        ),
        Metric(
            "reward/error",
            "share, 0 to 1",
            "Completions that a verifier or a function of yours could not score (it crashed or "
            "took longer than `rewards.timeout_s`): that part counts 0.",
            "0",
            "rewards",
        ),
        Metric(
            "reward/<part>",
            "0 to 1",
            "Mean of a part of the reward (`correct`, `format`, …) over completions that have it.",
            page="rewards",
        ),
        Metric(
            "reward/length_cost",
            "reward",
            "What length costs by the rule of the domain; `reward/length` is what was made of it "
            "and added.",
            page="rewards",
        ),
        Metric(
            "domain/<domain>/reward_mean",
            "reward",
            "`reward/mean` of one domain; with several domains only.",
        ),
        Metric(
            "domain/<domain>/length_mean",
            "tokens",
            "Sampled tokens of a completion in one domain, what is discarded included.",
        ),
        Metric(
            "domain/<domain>/calls_mean",
            "calls",
            "Tool calls of a trajectory in one domain with an environment.",
        ),
        Metric(
            "domain/<domain>/group_share",
            "share, 0 to 1",
            "Of the groups that the step learns from, those of one domain. Discarded groups are "
            "none, nor those with no completion better than another, unless they have a KL term.",
            "as `data.sources[].weight` has it",
            "data",
        ),
        Metric(
            "domain/<domain>/token_share",
            "share, 0 to 1",
            "The same of those groups' sampled tokens.",
            page="data",
        ),
    ),
    "Loss and gradient": (
        Metric(
            "loss",
            "",
            "GRPO: the negated objective (Eq. 8), whose value says little; without the terms of "
            "indexers and of `algorithm.kept_mass_coef`. `keel sft`, `keel pretrain`: nats per "
            "token.",
            "`keel sft`: falls; `keel train`: around 0, plus β times the KL",
        ),
        Metric("lr", "", "Learning rate of the step."),
        Metric(
            "grad_norm",
            "",
            "Norm of the gradient before clipping (`trainer.grad_clip`); none where it was not "
            "finite.",
            "of one size; a jump comes before trouble",
        ),
        Metric(
            "kl/ref",
            "nats per token",
            "KL to the reference policy, by the estimator of `algorithm.kl`; there where any "
            "source has a `kl_coef`.",
            "grows slowly, below 1",
            "stability",
        ),
        Metric(
            "clip/fraction",
            "share, 0 to 1",
            "Sampled tokens whose ratio the clip stops: their gradient is 0.",
            "near 0 on-policy",
        ),
        Metric(
            "entropy/kept",
            "nats per token",
            "Entropy of the policy over the sampling mask of each sampled token that is trained "
            "on: not of groups whose completions are all as good "
            "(`algorithm.skip_uniform_groups`), which are those of prompts that it has settled on.",
            "falls slowly; near 0 nothing new is tried",
        ),
        Metric(
            "nll",
            "nats per token",
            "`keel sft`, `keel pretrain`: mean of −log p over learned tokens, whatever the weight "
            "of their conversation.",
            "falls",
        ),
        Metric(
            "indexer/kl",
            "nats",
            "Loss of sparse attention's indexers: mean over tokens and layers.",
            "falls",
            "sparse-attention",
        ),
        Metric(
            "indexer/held",
            "share, 0 to 1",
            "Warm-up of indexers: dense attention that their top k hold.",
            "rises until the warm-up is done",
            "pretrain",
        ),
        Metric(
            "train/tokens",
            "tokens",
            "Computed by the trainer, contexts included; shared prompts count once.",
        ),
        Metric(
            "train/shared_tokens",
            "tokens",
            "Of shared prompts, not computed again (`trainer.share_prompts`). Absent: none.",
        ),
        Metric(
            "train/skipped_steps",
            "optimizer steps",
            "Those without a finite gradient; the weights stayed as they were.",
            "0; in float16 a few, while the loss's scale is found",
            "alarms",
        ),
        Metric(
            "train/skipped_no_signal",
            "optimizer steps",
            "Optimizer steps without an advantage or a KL term: the optimizer was skipped and the "
            "weights stayed as they were.",
            "0 or few",
            "rewards",
        ),
        Metric(
            "train/out_of_memory",
            "times",
            "A step did not fit the GPU, and was repeated from its beginning with smaller "
            "micro-batches (`trainer.micro_batch_tokens`), or with "
            "`trainer.activation_checkpointing`. Written where it happened.",
            "absent",
        ),
        Metric(
            "train/ranks",
            "trainer ranks",
            "Those that a run continues or starts with where there is no room for all "
            "(`trainer.min_ranks`). Written while they are fewer than `trainer.ranks`.",
            "absent",
            "reliability",
        ),
        Metric("train/loss_scale", "", "float16: what the loss is multiplied by."),
    ),
    "Engine against trainer": (
        Metric(
            "mismatch/logp_abs",
            "nats per token",
            "Mean |log π_θ − log π_old| before the step, over what its first optimizer step trains "
            "on: what engine and trainer compute differently, and how stale the completions are.",
            "rounding: 1e-7 in float32, 0.02 in bfloat16 with a small pretrained model, more with "
            "a less certain one. It stays: a jump means that the engine has other weights",
            "stability",
        ),
        Metric(
            "mismatch/kl",
            "nats per token",
            "KL(π_old ‖ π_θ) before the step, by the K3 estimate.",
            "near 0, and stays",
            "stability",
        ),
        Metric(
            "mismatch/ratio_mean",
            "",
            "Mean ratio π_θ/π_old of the sampled tokens before the step.",
            "1.000",
            "stability",
        ),
        Metric(
            "mismatch/ratio_max",
            "",
            "Largest ratio π_θ/π_old of a token before the step.",
            "1.000 in float32; stays in bfloat16",
            "stability",
        ),
        Metric(
            "mismatch/ratio_outside_fraction",
            "share, 0 to 1",
            "Sampled tokens whose ratio is further than 0.1 from 1.",
            "near 0",
            "stability",
        ),
        Metric(
            "mask/sequence_fraction",
            "share, 0 to 1",
            "Completions that the off-policy sequence mask (Eq. 9) leaves out, of those that are "
            "trained on (`algorithm.skip_uniform_groups` leaves out others).",
            "near 0 on-policy; grows with stale completions",
            "stability",
        ),
        Metric(
            "mask/logp_gap_max",
            "nats per token",
            "Largest mean of log π_old − log π_θ of a completion: what `algorithm.mask_delta` is "
            "compared with.",
            "below 0.2 on-policy",
            "stability",
        ),
        Metric(
            "routing/overlap",
            "share, 0 to 1",
            "Recorded experts that the trainer's router would choose, too; of shared prompts once.",
            "near 1",
            "stability",
        ),
        Metric(
            "routing/fallback_fraction",
            "share, 0 to 1",
            "Tokens, layer by layer, whose experts should have been recorded and were not (those "
            "of a shared prompt count once).",
            "0",
            "alarms",
        ),
        Metric(
            "sampling/kept_mean",
            "ids",
            "Mean size of the sampling masks; with truncated sampling only.",
            "a few; at `top_k` nothing is truncated by top_p",
        ),
        Metric(
            "sampling/kept_mass",
            "share, 0 to 1",
            "What the policy gives to the sampling masks as a whole, before each optimizer step: a "
            "mean over one token of each context, or over those that "
            "`algorithm.kept_mass_coef` looks at. With truncated sampling only. What a "
            "policy moves out of the masks changes no ratio, so that neither the clip nor "
            "`algorithm.mask_delta` sees it.",
            "above `rollout.sampling.top_p` (where `top_k` does not cut first), and steady",
            "stability",
        ),
        Metric(
            "sampling/mass_shortfall",
            "nats per token",
            "How far what the policy gives to a sampling mask lies below the square of "
            "`rollout.sampling.top_p`: the mean of max(0, log top_p² − log mass) over the tokens "
            "that `algorithm.kept_mass_coef` looks at; with it only.",
            "next to 0 with fresh weights; small and steady",
            "stability",
        ),
        Metric(
            "staleness/mean",
            "optimizer steps",
            "Age of the weights that sampled a token, when its batch is trained on: at the first "
            "of `algorithm.updates_per_batch` optimizer steps.",
            "0 with `algorithm.max_lag: 0`",
            "rollouts",
        ),
        Metric(
            "staleness/max",
            "optimizer steps",
            "The oldest token's.",
            "at most what `algorithm.max_lag` and `publish_every` allow",
            "rollouts",
        ),
    ),
}
"""Title → metrics."""
