"""Evaluation metrics and the definition of a pass."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from keel.rl.evaluation import evaluation, pass_at_k
from keel.rl.types import Group, ScoredGroup
from tests.rl.rollouts import prompt, segment, trajectory


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


@pytest.mark.parametrize("passes", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_matches_enumeration(passes: int, k: int) -> None:
    right = [True] * passes + [False] * (5 - passes)
    choices = list(itertools.combinations(right, k))
    assert pass_at_k(5, passes, k) == pytest.approx(sum(map(any, choices)) / len(choices))
