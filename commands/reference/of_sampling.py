"""Metrics of what was sampled or read, and of what a step took."""

from __future__ import annotations

from keel.commands.reference.metric import Metric

SAMPLING: dict[str, tuple[Metric, ...]] = {
    "Rollouts": (
        Metric("length/mean", "tokens", "Sampled tokens of a completion of the step's batch."),
        Metric(
            "length/sampled_mean",
            "tokens",
            "Sampled tokens of a completion, those left out of training included.",
            "as `length/mean` without filters; apart, something selects by length",
        ),
        Metric(
            "rollout/truncated_fraction",
            "share, 0 to 1",
            "Completions that hit a limit (max_tokens, a deadline); those whose environment was "
            "lost are `agents/crashes`.",
            "near 0",
            "alarms",
        ),
        Metric(
            "rollout/deadline_cuts",
            "completions",
            "Those among them that ran out of `rollout.timeout_s`.",
            "0",
            "rollouts",
        ),
        Metric(
            "rollout/dropped_completions",
            "completions",
            "Asked for and not in the batch: late, failed or left out with a reason.",
            "0",
            "alarms",
        ),
        Metric(
            "rollout/uniform_groups",
            "groups",
            "Sampled groups with no completion better than another, discarded ones included.",
        ),
        Metric(
            "rollout/uniform_group_fraction",
            "share, 0 to 1",
            "Share of the trained-on groups in which no completion is better than another.",
            "below 0.95: at 1 there is nothing to learn",
            "alarms",
        ),
        Metric(
            "rollout/filtered_<why>",
            "groups",
            "Groups that `algorithm.filter_groups` discarded, by why.",
            page="rollouts",
        ),
        Metric(
            "ledger/waiting",
            "prompts",
            "Taken from the sources and not trained on yet: sampled ahead.",
        ),
        Metric("ledger/lost", "prompts", "Taken and neither trained on nor waiting.", "0"),
        Metric("ledger/twice", "prompts", "Trained on twice.", "0"),
    ),
    "Agents": (
        Metric("agents/turns_mean", "turns", "Of the policy in a trajectory.", page="rollouts"),
        Metric(
            "agents/calls_mean",
            "calls",
            "Tool calls of a trajectory, malformed ones included.",
            page="rollouts",
        ),
        Metric(
            "agents/failed_call_fraction",
            "share, 0 to 1",
            "Of the calls, those that a tool answered with an error or that broke its schema.",
            "falls",
            "rollouts",
        ),
        Metric(
            "agents/malformed_fraction",
            "share, 0 to 1",
            "Of the calls, those that could not be read as one.",
            "near 0",
            "rollouts",
        ),
        Metric(
            "agents/prefix_hit_fraction",
            "share, 0 to 1",
            "Of the context tokens that an earlier turn had computed, those that came from the "
            "prefix cache.",
            "near 1; less where contexts are shorter than a few of its blocks",
            "rollouts",
        ),
        Metric(
            "agents/segments_mean",
            "contexts",
            "That a trajectory was sampled in.",
            "1 where contexts are not rewritten",
            "rollouts",
        ),
        Metric(
            "agents/rewrites_mean",
            "rewrites",
            "Of a trajectory's context, because its window was full.",
            page="rollouts",
        ),
        Metric(
            "agents/tools_seconds_mean",
            "seconds",
            "Of a trajectory in its tools.",
            page="rollouts",
        ),
        Metric(
            "agents/sampling_seconds_mean",
            "seconds",
            "Of a trajectory in the engine.",
            page="rollouts",
        ),
        Metric(
            "agents/crashes",
            "trajectories",
            "Whose environment crashed, hung or ended, left out or not; or whose agent program "
            "failed and counts as a failure.",
            "0",
            "environments",
        ),
        Metric(
            "agents/contexts_extended",
            "turns",
            "Of agent programs, whose context extended recorded tokens exactly: nothing was "
            "tokenised again.",
            "all turns but the first of each conversation",
            "agents-endpoint",
        ),
        Metric(
            "agents/contexts_branched",
            "turns",
            "Of agent programs, from recorded tokens that another turn had extended before.",
            "0 where a program asks for no second answer",
            "agents-endpoint",
        ),
        Metric(
            "agents/contexts_rendered",
            "turns",
            "Of agent programs, whose context was rendered from messages, in a new segment.",
            "one for each conversation",
            "agents-endpoint",
        ),
        Metric(
            "agents/contexts_refused",
            "requests",
            "Of agent programs, that got an error: a budget was spent, or a field is not "
            "supported.",
            "0, or one for each trajectory that is cut",
            "agents-endpoint",
        ),
        Metric(
            "agents/turn_cuts",
            "trajectories",
            "Cut at `agents.max_turns`.",
            "near 0",
            "rollouts",
        ),
        Metric(
            "agents/window_cuts",
            "trajectories",
            "Cut at `agents.window`.",
            "near 0",
            "rollouts",
        ),
        Metric(
            "agents/length_cuts",
            "trajectories",
            "Cut at `agents.max_sampled_tokens`, or in a turn at `rollout.sampling.max_tokens`.",
            "near 0",
            "rollouts",
        ),
    ),
    "Judge": (
        Metric("judge/completions", "completions", "Judged in the step.", page="rubrics"),
        Metric(
            "judge/skipped",
            "completions",
            "That got their score without asking the judge.",
            page="rubrics",
        ),
        Metric("judge/calls", "calls", "Of the endpoint, retries included.", page="rubrics"),
        Metric("judge/cache_hits", "replies", "From the cache, not asked for again."),
        Metric("judge/prompt_tokens", "tokens", "Of the judge's prompts."),
        Metric("judge/reply_tokens", "tokens", "Of its replies."),
        Metric(
            "judge/failures",
            "completions",
            "Completions that could not be judged (`rewards.judge.max_failure_fraction`).",
            "0",
            "rubrics",
        ),
        Metric("judge/failures_<kind>", "completions", "The same by kind of failure.", "none"),
        Metric(
            "judge/retries_<kind>",
            "calls",
            "Calls that were made again, by what came of the one before: `timeout`, `busy` (HTTP "
            "429), `server` (5xx), `unreachable`, `invalid` (a reply that is not what was asked "
            "for), `refused` (another HTTP status).",
            "none",
            "rubrics",
        ),
        Metric(
            "judge/call_seconds",
            "seconds",
            "Mean of the calls that ended, whatever came of them.",
            page="rubrics",
        ),
        Metric(
            "judge/queue_seconds",
            "seconds",
            "Mean wait of a question for its turn, with `rewards.judge.max_concurrent` under way.",
            page="rubrics",
        ),
    ),
    "Conversations (`keel sft`, `keel pretrain`)": (
        Metric("sft/conversations", "conversations", "In the step; of text: windows.", page="sft"),
        Metric("sft/learned_tokens", "tokens", "That the loss is over."),
        Metric("sft/tokens", "tokens", "The same with their contexts."),
        Metric(
            "sft/packed",
            "share, 0 to 1",
            "How full the micro-batches are.",
            "near 1; else `trainer.micro_batch_tokens` fits the lengths badly",
        ),
        Metric("sft/epochs", "epochs", "How often the conversations have been seen so far."),
    ),
    "Time": (
        Metric("time/step", "seconds", "Of the step, without evaluations and checkpoints."),
        Metric("time/rollout", "seconds", "The trainer waited for completions."),
        Metric("time/reward", "seconds", "The trainer waited for rewards."),
        Metric("time/train", "seconds", "Of optimizer steps."),
        Metric("time/sync", "seconds", "Of new weights to the engines, as far as it was waited."),
        Metric(
            "time/idle_fraction",
            "share, 0 to 1",
            "Of a step that the trainer waited for completions and rewards.",
            "`algorithm.max_lag` is there to lower it",
            "rollouts",
        ),
        Metric(
            "throughput/tokens_per_second",
            "tokens per second",
            "Sampled tokens of a step's batch (`keel sft`: learned tokens), by the seconds of the "
            "whole step. Groups that teach nothing (`algorithm.skip_uniform_groups`) count.",
            page="performance",
        ),
    ),
    "The run": (
        Metric("alarms", "alarms", "How many ring at this step.", "0", "alarms"),
        Metric(
            "checkpoint/unwritten",
            "checkpoints",
            "Checkpoints that could not be written so far; shown only once there is one.",
            "not there",
            "checkpoints",
        ),
    ),
}
"""Title → metrics."""
