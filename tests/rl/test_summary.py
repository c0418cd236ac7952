"""Metrics: merging, batches of rollouts, optimizer steps and evaluations."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from keel.rl.metrics import Max, Mean, Sum, mean_of, merge, values
from keel.rl.summary import evaluation, merge_optimizer_steps, pass_at_k, summarize
from keel.rl.types import CUT_OFF, Group, ScoredGroup, Usage
from tests.rl.rollouts import prompt, scored, segment, trajectory


def test_summary_by_hand() -> None:
    long = trajectory(segment(0, 5, version=3), segment(10, 3, version=4), finish="length")
    short = trajectory(segment(20, 2, version=5), sibling=1)
    groups = [
        scored(
            [long, short],
            [1.0, 0.0],
            parts=[{"correct": 1.0, "format": 0.5}, {"correct": 0.0}],
            dropped=("late", "too long"),
        ),
        scored([trajectory(segment(30, 2, version=5))], [0.5], parts=[{"correct": 1.0}]),
        scored([], [], dropped=("lost",)),
    ]
    assert summarize(groups, version=6) == {
        "reward/mean": Mean(1.5, 3),
        "reward/correct": Mean(2.0, 3),
        "reward/format": Mean(0.5, 1),
        "length/mean": Mean(6 + 1 + 1, 3),
        "length/sampled_mean": Mean(6 + 1 + 1, 3),
        # 4 tokens of version 3, 2 of version 4, 1 and 1 of version 5
        "staleness/mean": Mean(4 * 3 + 2 * 2 + 1 + 1, 8),
        "staleness/max": Max(3),
        "rollout/truncated_fraction": Mean(1, 3),
        "rollout/tokens": Sum(12),
        "rollout/deadline_cuts": Sum(0),
        "rollout/dropped_completions": Sum(3),
        "rollout/uniform_groups": Sum(1),
        "rollout/uniform_group_fraction": Mean(1, 2),
    }


def test_agent_metrics_cover_trajectories_with_usage() -> None:
    plain = trajectory(segment(0, 3), finish="length")
    long = Usage(
        turns=5, calls=6, failed_calls=2, malformed_calls=1, rewrites=1,
        repeated_tokens=900, cached_tokens=880, sampling_s=8.0, tools_s=2.0,
    )  # fmt: skip
    windows = trajectory(segment(0, 3), segment(4, 3), segment(8, 3), sibling=1, finish="window")
    kept = replace(windows, usage=long)
    lost = replace(trajectory(segment(20, 3), sibling=2, finish="turns"), usage=Usage(sampling_s=1))
    short = replace(
        trajectory(segment(30, 3), finish="length"),
        usage=Usage(turns=3, calls=2, failed_calls=2, repeated_tokens=100, cached_tokens=20),
    )
    trained = replace(scored([plain, kept], [0, 1], dropped=(CUT_OFF,)), left_out=(lost,))
    metrics = summarize([trained], version=0, discarded=[scored([short], [0.0])])
    assert {name: m for name, m in metrics.items() if name.startswith("agents/")} == {
        "agents/turns_mean": Mean(5 + 1 + 3, 3),
        "agents/calls_mean": Mean(6 + 2, 3),
        "agents/failed_call_fraction": Mean(4, 8),
        "agents/malformed_fraction": Mean(1, 8),
        "agents/prefix_hit_fraction": Mean(900, 1000),
        "agents/segments_mean": Mean(3 + 1 + 1, 3),
        "agents/rewrites_mean": Mean(1, 3),
        "agents/tools_seconds_mean": Mean(2.0, 3),
        "agents/sampling_seconds_mean": Mean(9.0, 3),
        "agents/turn_cuts": Sum(1),
        "agents/window_cuts": Sum(1),
        "agents/length_cuts": Sum(1),
    }


def test_domain_metrics_need_several_domains() -> None:
    def group(domain: str, reward: float, tokens: int):
        return scored([trajectory(segment(0, tokens))], [reward], domain=domain)

    several = summarize([group("sums", 1.0, 3), group("code", 0.0, 5)], version=0)
    assert several["domain/sums/reward_mean"] == Mean(1.0, 1)
    assert several["domain/code/reward_mean"] == Mean(0.0, 1)
    assert several["domain/sums/length_mean"] == Mean(2, 1)
    assert several["domain/code/length_mean"] == Mean(4, 1)
    assert "domain/sums/calls_mean" not in several
    shop = scored([replace(trajectory(segment(0, 3)), usage=Usage(calls=3))], [0.0], domain="shop")
    prompt = replace(shop.group.prompt, environment="shop")
    shop = replace(shop, group=replace(shop.group, prompt=prompt))
    agents = summarize([group("sums", 1.0, 3), shop], version=0)
    assert agents["domain/shop/calls_mean"] == Mean(3, 1)
    one = summarize([group("sums", 1.0, 3), group("sums", 0.0, 5)], version=0)
    assert not [name for name in one if name.startswith("domain/")]


def test_domain_shares_cover_groups_with_gradient() -> None:
    def group(domain: str, *rewards: float, tokens: int = 3, kl_coef: float = 0.0):
        ours = [trajectory(segment(at, tokens), sibling=at) for at in range(len(rewards))]
        made = scored(ours, rewards, domain=domain)
        prompt = replace(made.group.prompt, kl_coef=kl_coef)
        return replace(made, group=replace(made.group, prompt=prompt))

    solved = group("sums", 1, 1)
    trained = [group("sums", 1, 0), solved, group("code", 1, 0, 0, tokens=5), scored([], [])]
    metrics = summarize(trained, version=0, discarded=[group("lost", 1, 0)])
    assert metrics["domain/sums/group_share"] == Mean(1, 2)
    assert metrics["domain/code/group_share"] == Mean(1, 2)
    assert metrics["domain/sums/token_share"] == Mean(4, 4 + 12)
    assert metrics["domain/lost/group_share"] == Mean(0, 2)
    held = summarize([solved, group("chat", 1, 1, kl_coef=0.01)], version=0)
    assert held["domain/chat/token_share"].value == 1
    nothing = summarize([solved, group("code", 0, 0)], version=0)
    assert not [name for name in nothing if name.endswith("_share")]


def test_updates_merge_over_ranks() -> None:
    one = [
        {"loss": Sum(0.5), "mismatch/ratio_max": Max(1.0), "clip/fraction": Mean(0, 10)},
        {"loss": Sum(0.25), "mismatch/ratio_max": Max(3.0), "clip/fraction": Mean(1, 10)},
    ]
    # The second step of the other rank has only padding.
    other = [{"loss": Sum(1.5), "mismatch/ratio_max": Max(1.5)}, {}]
    actual = values(merge([merge_optimizer_steps(one), merge_optimizer_steps(other)]))
    loss = (0.5 + 1.5 + 0.25) / 2
    assert actual == {"loss": loss, "mismatch/ratio_max": 1.5, "clip/fraction": 0.05}
    assert merge_optimizer_steps(one[:1]) == one[0]


def test_merge_equals_direct_computation() -> None:
    parts = [
        {"mean": mean_of([1.0, 2.0, 6.0]), "sum": Sum(2), "max": Max(3.0)},
        {"mean": mean_of([11.0]), "sum": Sum(5), "max": Max(-1.0), "rare": Mean(1.0, 2)},
        {"mean": mean_of([])},
    ]
    for order in (parts, parts[::-1]):
        assert values(merge(order)) == {"mean": 5.0, "sum": 7.0, "max": 3.0, "rare": 0.5}
    assert merge([]) == {}


def test_empty_mean_is_nan_and_merges_neutrally() -> None:
    assert math.isnan(mean_of([]).value)
    assert mean_of([]).merge(Mean(3.0, 2)) == Mean(3.0, 2)


def test_nan_propagates() -> None:
    for first, second in ((1.0, math.nan), (math.nan, 1.0)):
        assert math.isnan(Max(first).merge(Max(second)).value)
        assert math.isnan(Sum(first).merge(Sum(second)).value)
        assert math.isnan(Mean(first, 1).merge(Mean(second, 1)).value)


def test_types_of_a_name_must_match() -> None:
    with pytest.raises(ValueError, match="loss"):
        merge([{"loss": Mean(1.0, 1)}, {"loss": Sum(1.0)}])


def group(parts: Sequence[Mapping[str, float]], dropped: Sequence[str] = ()) -> ScoredGroup:
    rewards = np.array([part["correct"] for part in parts], np.float32)
    trajectories = tuple(trajectory(segment(), sibling=i) for i in range(len(parts)))
    return ScoredGroup(
        group=Group(prompt=prompt(), trajectories=trajectories, dropped=tuple(dropped)),
        rewards_G=rewards,
        parts_G=tuple(parts),
        advantages_G=rewards * 0,
    )


def test_partial_credit_counts_in_score_only() -> None:
    actual = evaluation([group([{"correct": c} for c in (1.0, 0.9999999, 0.5, 0.0)])])
    assert actual["pass@1"].value == 1 / 4
    assert actual["score"].value == pytest.approx(2.4999999 / 4)
    assert actual["unscored"].value == 0


def test_missing_and_failed_completions_are_unscored() -> None:
    failed = {"correct": 0.0, "error": 1.0}
    right = {"correct": 1.0, "error": 1.0}  # another reward part failed
    actual = evaluation([group([{"correct": 1.0}, failed, right], ["late", "unjudged"])])
    assert actual["pass@1"].value == 2 / 5
    assert actual["score"].value == pytest.approx(2 / 3)
    assert actual["unscored"].value == 3


@pytest.mark.parametrize(
    ("kind", "part", "count"),
    [("answer", "correct", 1), ("answer", "mine.brief", 0), ("functions", "mine.brief", 1)],
)
def test_only_failures_of_correct_are_unscored(kind: str, part: str, count: int) -> None:
    made = group([{"correct": 0.0, "error": 1.0}])
    new_prompt = replace(made.group.prompt, reward={"kind": kind})
    made = replace(
        made, group=replace(made.group, prompt=new_prompt), notes_G=({part: "error: x"},)
    )
    assert evaluation([made])["unscored"].value == count


def test_pass_at_k_matches_enumeration() -> None:
    for passes, k in itertools.product(range(6), range(1, 6)):
        right = [True] * passes + [False] * (5 - passes)
        choices = list(itertools.combinations(right, k))
        assert pass_at_k(5, passes, k) == pytest.approx(sum(map(any, choices)) / len(choices))
