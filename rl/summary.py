"""Compute the metrics of rollouts, of the optimizer steps on them, and of evaluations."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from keel.rl.metrics import Max, Mean, Metric, Sum, mean_of, merge
from keel.rl.types import FUNCTIONS, LOST, FinishReason, ScoredGroup, Segment, Trajectory

ERROR = "error"
"""Name of the reward part that is positive if a completion could not be scored, because its
verifier crashed or timed out. It never has a weight."""
_PASS = 1 - 1e-9
"""Minimum `correct` value of a passing completion. It is slightly below 1 to tolerate rounding in a
weighted mean. Reward functions keep partial credit well below it
(`keel.rewards.rules.reasoning_gym`)."""
FAIL = 1e-9
"""Maximum `correct` value of a completion without any credit. It is slightly above 0 to tolerate
rounding."""
_CUTS: Mapping[str, FinishReason] = {"turn": "turns", "window": "window", "length": "length"}
"""Maps each metric `agents/<name>_cuts` to the finish reason that it counts.
`rollout/deadline_cuts` counts the reason `deadline`."""


def summarize(
    trained: Sequence[ScoredGroup], *, version: int, discarded: Sequence[ScoredGroup] = ()
) -> dict[str, Metric]:
    """Compute the metrics of a batch of rollouts for a policy at `version`.

    The metrics cover different groups and trajectories:
        reward/…, rollout/dropped_completions, rollout/uniform_groups
            all sampled groups, including `discarded` ones (`algorithm.filter_groups`); without
            them, a policy that is nearly always right would look like one that is right half the
            time
        length/mean, staleness/…, sampling/kept_mean, rollout/uniform_group_fraction
            groups to train on
        length/sampled_mean, rollout/tokens, rollout/truncated_fraction, rollout/deadline_cuts
            all sampled trajectories, including dropped ones; a difference from length/mean
            shows that length affects the selection
        agents/…
            sampled trajectories with a `Usage`; see `_agent_metrics`. agents/crashes counts lost
            environments and failed agent programs, dropped or not
        domain/<name>/…
            only with several domains; shares are fractions of the groups with a gradient

    Lengths count sampled tokens. Staleness is measured in optimizer steps and averaged over sampled
    tokens. Most other means are over completions, so a group that lost completions has less weight
    than in the loss. A reward part is averaged over the completions that have it, and
    `sampling/kept_mean` over the tokens whose sampling was truncated.

    Raises `ValueError` if a reward part is named `mean`, which would collide with
    `reward/mean`.
    """
    groups = [*trained, *discarded]
    all_scored = _trajectories(groups)
    sampled = all_scored + [t for group in groups for t in group.left_out]
    ours = _trajectories(trained)
    metrics: dict[str, Metric] = {
        "reward/mean": _mean_reward(groups),
        "length/mean": _mean_length(ours),
        "length/sampled_mean": _mean_length(sampled),
        **_staleness(ours, version),
        "rollout/truncated_fraction": mean_of(
            t.cut and t.finish_reason != "crash" for t in sampled
        ),
        "rollout/tokens": Sum(sum(t.total_tokens for t in sampled)),
        "rollout/deadline_cuts": Sum(sum(t.finish_reason == "deadline" for t in sampled)),
        "rollout/dropped_completions": Sum(sum(len(group.group.dropped) for group in groups)),
        "rollout/uniform_groups": Sum(sum(group.uniform for group in groups)),
        "rollout/uniform_group_fraction": mean_of(
            group.uniform for group in trained if group.parts_G
        ),
    }
    mask_size = _mean_mask_size(ours)
    if mask_size.count:
        metrics["sampling/kept_mean"] = mask_size
    metrics |= _agent_metrics(sampled)
    if any(group.group.prompt.environment for group in groups):
        reasons = [reason for group in groups for reason in group.group.dropped]
        crashed = sum(t.finish_reason == "crash" for t in sampled)
        metrics["agents/crashes"] = Sum(sum(LOST in reason for reason in reasons) + crashed)
    values: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        for parts in group.parts_G:
            if "mean" in parts:
                raise ValueError(
                    f"group of {group.group.prompt.prompt_id}: the name of reward part 'mean' "
                    "collides with the metric reward/mean. Rename the part"
                )
            for name, value in parts.items():
                values[name].append(value)
    metrics |= {f"reward/{name}": mean_of(numbers) for name, numbers in values.items()}
    domains: defaultdict[str, list[ScoredGroup]] = defaultdict(list)
    for group in groups:
        domains[group.group.prompt.domain].append(group)
    learning = [group for group in trained if group.group.trajectories and not group.idle]
    for name, members in domains.items() if len(domains) > 1 else ():
        trajectories = _trajectories(members)
        metrics[f"domain/{name}/reward_mean"] = _mean_reward(members)
        metrics[f"domain/{name}/length_mean"] = _mean_length(trajectories)
        if any(group.group.prompt.environment for group in members):
            usages = (t.usage for t in trajectories)
            metrics[f"domain/{name}/calls_mean"] = mean_of(u.calls for u in usages if u is not None)
        if learning:
            mine = [group for group in learning if group.group.prompt.domain == name]
            metrics[f"domain/{name}/group_share"] = Mean(len(mine), len(learning))
            tokens, total = sampled_tokens(mine), sampled_tokens(learning)
            metrics[f"domain/{name}/token_share"] = Mean(tokens, total)
    return metrics


def merge_optimizer_steps(steps: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of all optimizer steps that use the same batch. `steps` must be in step
    order. `mismatch/*` comes from the first step only, because later steps no longer use the
    weights that the batch was sampled from. `loss` is averaged over the steps."""
    parts: list[dict[str, Metric]] = []
    for index, metrics in enumerate(steps):
        part = {k: v for k, v in metrics.items() if index == 0 or not k.startswith("mismatch/")}
        if "loss" in part:
            part["loss"] = Sum(part["loss"].value / len(steps))
        parts.append(part)
    return merge(parts)


def sampled_tokens(groups: Sequence[ScoredGroup]) -> int:
    return sum(t.sampled_tokens for t in _trajectories(groups))


def _trajectories(groups: Sequence[ScoredGroup]) -> list[Trajectory]:
    return [t for group in groups for t in group.group.trajectories]


def _segments(trajectories: Sequence[Trajectory]) -> list[Segment]:
    return [segment for t in trajectories for segment in t.segments]


def _mean_reward(groups: Sequence[ScoredGroup]) -> Mean:
    return mean_of(float(reward) for group in groups for reward in group.rewards_G)


def _mean_length(trajectories: Sequence[Trajectory]) -> Mean:
    return mean_of(t.sampled_tokens for t in trajectories)


def _mean_mask_size(trajectories: Sequence[Trajectory]) -> Mean:
    total = count = 0
    for segment in _segments(trajectories):
        if (sizes := segment.mask_sizes_T) is not None:
            sizes = sizes[segment.trainable_T]
            total += int(sizes.sum())
            count += int(np.count_nonzero(sizes))
    return Mean(total, count)


def _staleness(trajectories: Sequence[Trajectory], version: int) -> dict[str, Metric]:
    versions = [s.version_T[s.trainable_T] for s in _segments(trajectories)]
    total = sum(version * len(v) - int(v.sum()) for v in versions)
    return {
        "staleness/mean": Mean(total, sum(map(len, versions))),
        "staleness/max": Max(
            max((float(version - v.min()) for v in versions if len(v)), default=0.0)
        ),
    }


def _agent_metrics(sampled: Sequence[Trajectory]) -> dict[str, Metric]:
    """Compute the `agents/…` metrics for trajectories that have a `Usage`.
    `failed_call_fraction` and `malformed_fraction` are fractions of all tool calls, and
    `prefix_hit_fraction` is a fraction of the context tokens that an earlier turn had already
    computed. Fractions are omitted if their denominator is 0. The `contexts_…` metrics are sums
    over the turns of agent programs."""
    used = [(t, t.usage) for t in sampled if t.usage is not None]
    if not used:
        return {}

    def mean(name: str) -> Mean:
        return mean_of(getattr(usage, name) for _, usage in used)

    def share(part: str, whole: str) -> Mean:
        return Mean(mean(part).total, mean(whole).total)

    shares = {
        "agents/failed_call_fraction": share("failed_calls", "calls"),
        "agents/malformed_fraction": share("malformed_calls", "calls"),
        "agents/prefix_hit_fraction": share("cached_tokens", "repeated_tokens"),
    }
    contexts = {
        f"agents/contexts_{kind}": Sum(mean(f"contexts_{kind}").total)
        for kind in ("extended", "branched", "rendered", "refused")
    }
    return {
        "agents/turns_mean": mean("turns"),
        "agents/calls_mean": mean("calls"),
        "agents/segments_mean": mean_of(len(t.segments) for t, _ in used),
        "agents/rewrites_mean": mean("rewrites"),
        "agents/tools_seconds_mean": mean("tools_s"),
        "agents/sampling_seconds_mean": mean("sampling_s"),
        **{name: value for name, value in shares.items() if value.count},
        **(contexts if mean("contexts_rendered").total else {}),
        **{
            f"agents/{name}_cuts": Sum(sum(t.finish_reason == reason for t, _ in used))
            for name, reason in _CUTS.items()
        },
    }


# --- Evaluations ---


def passed(correct: float) -> bool:
    """Return True if a completion is fully correct. Partial credit and NaN do not count."""
    return correct >= _PASS


def pass_at_k(samples: int, passes: int, k: int) -> float:
    """Compute the unbiased estimate of the probability that at least one of k completions passes: 1
    − C(n−c, k) / C(n, k), where n is `samples` and c is `passes` (Chen et al., 2021, Eq. 1). Raises
    ValueError unless 1 ≤ k ≤ samples."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} completions: k must be between 1 and {samples}")
    return 1 - math.comb(samples - passes, k) / math.comb(samples, k)


def evaluation(groups: Sequence[ScoredGroup]) -> dict[str, Metric]:
    """Compute evaluation metrics from scored groups.

    pass@1    fraction of the requested completions that are fully correct (`passed`), where
              missing and unscored ones count as wrong (Chen et al., 2021, k = 1)
    score     mean of `correct` over all scored completions, including partial credit; 0 if the
              verifier failed
    unscored  number of completions that are missing or whose `correct` could not be determined
    """
    correct = [parts["correct"] for group in groups for parts in group.parts_G]
    missing = sum(len(group.group.dropped) for group in groups)
    failed = 0
    for group in groups:
        functions = group.group.prompt.reward.get("kind") == FUNCTIONS
        for index, parts in enumerate(group.parts_G):
            ours = not group.notes_G or functions or "correct" in group.notes_G[index]
            failed += parts.get(ERROR, 0.0) > 0 and not passed(parts["correct"]) and ours
    return {
        "pass@1": Mean(float(sum(map(passed, correct))), float(len(correct) + missing)),
        "score": mean_of(correct),
        "unscored": Sum(float(missing + failed)),
    }
