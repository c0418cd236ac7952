"""What a batch of rollouts looked like before it is trained on, and what training on it saw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from keel.rl.metrics import Max, Mean, Metric, Sum, mean_of, merge
from keel.rl.types import LOST, FinishReason, ScoredGroup, Trajectory

CUTS: Mapping[str, FinishReason] = {"turn": "turns", "window": "window", "length": "length"}
"""`agents/<name>_cuts` by finish reason; `rollout/deadline_cuts` counts the one that is left."""


def summarize(
    trained: Sequence[ScoredGroup], *, version: int, discarded: Sequence[ScoredGroup] = ()
) -> dict[str, Metric]:
    """Rewards, lengths, staleness and dropped samples of a batch, for a policy now at `version`.

    Over which completions:

    - `reward/…`, `rollout/dropped_completions` and `rollout/uniform_groups`: of all groups that
      were sampled for the batch, the `discarded` ones (`algorithm.filter_groups`) included. Without
      them a policy that is nearly always right would look as good as one that is right half the
      time.
    - `length/mean`, `staleness/…`, `sampling/kept_mean` and `rollout/uniform_group_fraction` (the
      share of groups with no completion better than another: at 1 there is nothing to learn): of
      what is trained on.
    - `length/sampled_mean`, `rollout/truncated_fraction` (cut off by a limit) and
      `rollout/deadline_cuts` (those among them that ran out of time): of everything that was
      sampled, completions that were left out included. Where it differs from `length/mean`, length
      decides about what is trained on.
    - `agents/…`: of all of those that have a `Usage`, and there with such ones only: see `_agents`.
      `agents/crashes`: those whose environment was lost, whether they were left out or count, and
      those that count as failures since their agent program failed.

    Lengths count sampled tokens; staleness is in optimizer steps, over sampled tokens. All means
    are over completions, so that a group that lost some weighs less in them than in the loss. A
    part of the reward is averaged over the completions that have it, `sampling/kept_mean` over the
    tokens that truncated sampling drew. The latter is there with truncation only, and
    `domain/<name>/…` with several domains only (`calls_mean` with an environment; shares are of
    the groups in which the loss has a gradient).

    Raises `ValueError` for a reward part named `mean`, whose metric would be `reward/mean`.
    """
    groups = [*trained, *discarded]
    trajectories = [t for group in groups for t in group.group.trajectories]
    sampled = trajectories + [t for group in groups for t in group.left_out]
    ours = [t for group in trained for t in group.group.trajectories]
    metrics: dict[str, Metric] = {
        "reward/mean": _reward(groups),
        "length/mean": _length(ours),
        "length/sampled_mean": _length(sampled),
        "staleness/mean": _staleness(ours, version),
        "staleness/max": _oldest(ours, version),
        "rollout/truncated_fraction": mean_of(
            t.cut and t.finish_reason != "crash" for t in sampled
        ),
        "rollout/deadline_cuts": Sum(sum(t.finish_reason == "deadline" for t in sampled)),
        "rollout/dropped_completions": Sum(sum(len(group.group.dropped) for group in groups)),
        "rollout/uniform_groups": Sum(sum(group.uniform for group in groups)),
        "rollout/uniform_group_fraction": mean_of(
            group.uniform for group in trained if group.parts_G
        ),
    }
    kept = _kept(ours)
    if kept.count:
        metrics["sampling/kept_mean"] = kept
    metrics |= _agents(sampled)
    if any(group.group.prompt.environment for group in groups):
        metrics["agents/crashes"] = Sum(_crashes(groups, sampled))
    metrics |= {f"reward/{name}": part for name, part in _parts(groups).items()}
    domains: defaultdict[str, list[ScoredGroup]] = defaultdict(list)
    for group in groups:
        domains[group.group.prompt.domain].append(group)
    taught = [group for group in trained if group.group.trajectories and not group.idle]
    for name, members in domains.items() if len(domains) > 1 else ():
        metrics[f"domain/{name}/reward_mean"] = _reward(members)
        metrics[f"domain/{name}/length_mean"] = _length(
            [t for group in members for t in group.group.trajectories]
        )
        if any(group.group.prompt.environment for group in members):
            metrics[f"domain/{name}/calls_mean"] = _calls(members)
        if taught:
            metrics[f"domain/{name}/group_share"] = _share(name, taught, len)
            metrics[f"domain/{name}/token_share"] = _share(name, taught, sampled_tokens)
    return metrics


def of_updates(updates: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metrics of the optimizer steps on one batch, in their order, as those of the batch.

    `mismatch/*` is of the first: it compares the engine that sampled with the weights before any.
    `loss` is a share of each step's (`keel.rl.losses`), and comes as the same share of their mean.
    """
    parts: list[dict[str, Metric]] = []
    for index, metrics in enumerate(updates):
        part = {k: v for k, v in metrics.items() if index == 0 or not k.startswith("mismatch/")}
        if "loss" in part:
            part["loss"] = Sum(part["loss"].value / len(updates))
        parts.append(part)
    return merge(parts)


def _reward(groups: Sequence[ScoredGroup]) -> Mean:
    return mean_of(float(reward) for group in groups for reward in group.rewards_G)


def _parts(groups: Sequence[ScoredGroup]) -> dict[str, Mean]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        for parts in group.parts_G:
            if "mean" in parts:
                raise ValueError(
                    f"group of {group.group.prompt.prompt_id}: a reward part is named 'mean', but "
                    "reward/mean is the whole reward; rename it"
                )
            for name, value in parts.items():
                values[name].append(value)
    return {name: mean_of(numbers) for name, numbers in values.items()}


def _length(trajectories: Sequence[Trajectory]) -> Mean:
    return mean_of(t.sampled_tokens for t in trajectories)


def _calls(groups: Sequence[ScoredGroup]) -> Mean:
    """Tool calls of a trajectory."""
    used = (t.usage for group in groups for t in group.group.trajectories)
    return mean_of(usage.calls for usage in used if usage is not None)


def sampled_tokens(groups: Sequence[ScoredGroup]) -> int:
    return sum(t.sampled_tokens for group in groups for t in group.group.trajectories)


def _share(
    domain: str, groups: Sequence[ScoredGroup], size: Callable[[Sequence[ScoredGroup]], int]
) -> Mean:
    ours = [group for group in groups if group.group.prompt.domain == domain]
    return Mean(size(ours), size(groups))


def _staleness(trajectories: Sequence[Trajectory], version: int) -> Mean:
    total = count = 0
    for segment in (segment for t in trajectories for segment in t.segments):
        sampled = segment.version_T[segment.trainable_T]
        total += version * len(sampled) - int(sampled.sum())
        count += len(sampled)
    return Mean(total, count)


def _oldest(trajectories: Sequence[Trajectory], version: int) -> Max:
    segments = (segment for t in trajectories for segment in t.segments)
    sampled = (segment.version_T[segment.trainable_T] for segment in segments)
    return Max(max((float(version - v.min()) for v in sampled if len(v)), default=0.0))


def _agents(sampled: Sequence[Trajectory]) -> dict[str, Metric]:
    """Means over trajectories, each with as many segments as its context had beginnings: one, one
    more for each rewrite and for each time that its thinking was left out. `failed_call_fraction`
    and `malformed_fraction` are of tool calls, `prefix_hit_fraction` of the context tokens that an
    earlier turn had computed; where there is no call, or no such token, they are not there.
    `contexts_…` are sums over the turns of agent programs, where there are any."""
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
        "agents/contexts_extended": Sum(mean("contexts_extended").total),
        "agents/contexts_branched": Sum(mean("contexts_branched").total),
        "agents/contexts_rendered": Sum(mean("contexts_rendered").total),
        "agents/contexts_refused": Sum(mean("contexts_refused").total),
    }
    return {
        "agents/turns_mean": mean("turns"),
        "agents/calls_mean": mean("calls"),
        "agents/segments_mean": mean_of(len(t.segments) for t, _ in used),
        "agents/rewrites_mean": mean("rewrites"),
        "agents/tools_seconds_mean": mean("tools_s"),
        "agents/sampling_seconds_mean": mean("sampling_s"),
        **{name: found for name, found in shares.items() if found.count},
        **(contexts if mean("contexts_rendered").total else {}),
        **{
            f"agents/{name}_cuts": Sum(sum(t.finish_reason == reason for t, _ in used))
            for name, reason in CUTS.items()
        },
    }


def _crashes(groups: Sequence[ScoredGroup], sampled: Sequence[Trajectory]) -> int:
    reasons = [reason for group in groups for reason in group.group.dropped]
    return sum(LOST in r for r in reasons) + sum(t.finish_reason == "crash" for t in sampled)


def _kept(trajectories: Sequence[Trajectory]) -> Mean:
    total = count = 0
    for segment in (segment for t in trajectories for segment in t.segments):
        if segment.sampling_mask is not None:
            sizes = segment.sampling_mask.sizes()[segment.trainable_T]
            total += int(sizes.sum())
            count += int(np.count_nonzero(sizes))
    return Mean(total, count)
