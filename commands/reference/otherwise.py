"""What to do where a metric is not what it is when all is well."""

from __future__ import annotations

from collections.abc import Mapping

OTHERWISE: Mapping[str, str] = {
    "eval/<set>/pass@1": "flat while `reward/mean` rises: the reward is gained in another way than "
    "by being right; read trajectories, check `rewards`. Falling: lower `trainer.lr`, raise "
    "`data.sources[].kl_coef`",
    "eval/<set>/unscored": "as for `reward/error` and `rollout/dropped_completions`",
    "eval/<set>/loss": "rising: fewer epochs (`sft.epochs`), or more conversations",
    "reward/mean": "flat: look at `rollout/uniform_group_fraction`; prompts may be too hard or too "
    "easy (`keel filter`), or `trainer.lr` too low. Falling: lower `trainer.lr`",
    "reward/error": "`rewards/` in the run folder has the errors; a slow verifier needs a larger "
    "`rewards.timeout_s`",
    "domain/<domain>/group_share": "far below: its prompts are too easy or too hard (`keel "
    "filter`), or its `data.sources[].weight` too small",
    "grad_norm": "spikes: lower `trainer.lr`; look at `mismatch/ratio_max` and at the completions "
    "of that step. Absent: no group differs, and the optimizer was skipped",
    "clip/fraction": "more: lower `trainer.lr` or `algorithm.updates_per_batch`",
    "kl/ref": "raise `data.sources[].kl_coef`, lower `trainer.lr`; read trajectories: a reward may "
    "be exploited",
    "entropy/kept": "collapses early: lower `trainer.lr`, raise `algorithm.clip_high` (0.28), add "
    "`data.sources[].kl_coef`, larger `algorithm.group_size`",
    "nll": "flat: raise `trainer.lr`. Spikes: lower it, or set `trainer.warmup_steps`",
    "train/skipped_no_signal": "prompts are too easy or too hard: other data (`keel filter`), a "
    "larger `algorithm.group_size`, or more prompts a step (`algorithm.prompts_per_step`)",
    "train/skipped_steps": "the terminal names completion, token and layer; `keel replay`. In "
    "float16 use `model.dtype`: bfloat16",
    "mismatch/logp_abs": "high from the first step: precision (`rollout.dtype`, "
    "`rollout.head_dtype`; `model.dtype`: float16 has an eighth of it, with "
    "`model.residual_dtype`: float32 an eleventh) or a model that both compute differently. "
    "Jumping later: the engine has other weights; a bug worth reporting",
    "mismatch/kl": "as for `mismatch/logp_abs`",
    "mismatch/ratio_mean": "below 1 from the first step: sampling is truncated and the masks are "
    "not replayed (`algorithm.keep_sampling_mask`)",
    "mismatch/ratio_max": "with `staleness/mean` above 0 some of it is drift; else as for "
    "`mismatch/logp_abs`",
    "mismatch/ratio_outside_fraction": "as for `mismatch/logp_abs`; `model.dtype`: float16 has "
    "next to none",
    "mask/sequence_fraction": "lower `algorithm.max_lag`, `trainer.lr` or "
    "`algorithm.updates_per_batch`; short completions in bfloat16: raise `algorithm.mask_delta`",
    "mask/logp_gap_max": "above δ on fresh samples: raise `algorithm.mask_delta`, or compute more "
    "exactly (`model.dtype`: float16)",
    "routing/overlap": "far below: engine and trainer differ in precision, or in the model; replay "
    "keeps the gradient right",
    "routing/fallback_fraction": "tokens were trained without their record: a bug worth reporting",
    "sampling/kept_mean": "at `rollout.sampling.top_k`: raise it, or `top_p` cuts nothing",
    "sampling/kept_mass": "falls with staleness: set `algorithm.kept_mass_coef`: 1, or lower "
    "`algorithm.publish_every`, `algorithm.max_lag`, `trainer.lr` or "
    "`algorithm.updates_per_batch`",
    "sampling/mass_shortfall": "grows: raise `algorithm.kept_mass_coef`, or as for "
    "`sampling/kept_mass`",
    "staleness/mean": "more than wanted: lower `algorithm.max_lag` or `algorithm.publish_every`",
    "length/sampled_mean": "look at `rollout/dropped_completions` and `algorithm.filter_groups`",
    "rollout/truncated_fraction": "raise `rollout.sampling.max_tokens`, or charge length "
    "(`data.sources[].length`)",
    "rollout/deadline_cuts": "raise `rollout.timeout_s`, or lower `rollout.sampling.max_tokens`",
    "rollout/dropped_completions": "the terminal has the reasons; `rollout.timeout_s`",
    "rollout/uniform_group_fraction": "prompts of medium difficulty (`keel filter`), "
    "`algorithm.filter_groups`, larger `algorithm.group_size`",
    "ledger/lost": "a bug worth reporting",
    "ledger/twice": "a bug worth reporting",
    "agents/malformed_fraction": "fewer or simpler tools; supervised examples first (`keel sft`)",
    "agents/failed_call_fraction": "read trajectories: descriptions of tools and their errors are "
    "all that the policy sees",
    "agents/prefix_hit_fraction": "`rollout.enable_prefix_caching`; more KV cache "
    "(`rollout.gpu_memory_utilization`); fewer sequences at once (`rollout.max_num_seqs`)",
    "agents/crashes": "the terminal names the environment's or the program's error",
    "agents/contexts_rendered": "the program edits its history or the policy's words: see what "
    "begins a segment in agents-endpoint.md",
    "agents/contexts_refused": "the terminal and `keel check` name the field",
    "agents/turn_cuts": "raise `agents.max_turns`",
    "agents/window_cuts": "raise `agents.window`, or set `agents.context`",
    "agents/length_cuts": "raise `agents.max_sampled_tokens` or `rollout.sampling.max_tokens`",
    "judge/failures": "the endpoint is overloaded or answers no JSON: lower "
    "`rewards.judge.max_concurrent`, see `events.jsonl` for the reasons",
    "judge/retries_<kind>": "timeout: raise `rewards.judge.timeout_s`, or lower "
    "`rewards.judge.max_concurrent`. busy, server: lower that. invalid: raise "
    "`rewards.judge.max_reply_tokens`, or take another judge",
    "judge/queue_seconds": "as long as `judge/call_seconds` or more: raise "
    "`rewards.judge.max_concurrent` if the endpoint has room",
    "sft/packed": "raise `trainer.micro_batch_tokens`",
    "time/idle_fraction": "`algorithm.max_lag`: 1; more engines (`rollout.engines`) for as many "
    "ranks",
    "alarms": "the terminal says which and what to do",
    "checkpoint/unwritten": "free space in `run.dir`; the next checkpoint is tried again",
}
"""Metric → what to do, with knobs in backticks."""
