"""pass@1 counts what is wholly right among all that was asked for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from keel.rl.evaluation import evaluation, pass_at_k, passed
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


def test_partial_credit_is_in_the_score_alone() -> None:
    found = evaluation([group([{"correct": c} for c in (1.0, 0.9999999, 0.5, 0.0)])])
    assert found["pass@1"].value == 1 / 4
    assert found["score"].value == pytest.approx(2.4999999 / 4)
    assert found["unscored"].value == 0


def test_the_rounding_of_a_sum_of_parts_is_still_a_pass() -> None:
    whole = sum([0.1] * 10)
    assert whole < 1
    assert evaluation([group([{"correct": whole}])])["pass@1"].value == 1


def test_late_failed_and_unjudged_completions_are_wrong_and_counted() -> None:
    failed = {"correct": 0.0, "error": 1.0}
    right = {"correct": 1.0, "error": 1.0}  # another part of its reward failed
    found = evaluation([group([{"correct": 1.0}, failed, right], ["late", "unjudged"])])
    assert found["pass@1"].value == 2 / 5
    assert found["score"].value == pytest.approx(2 / 3)
    assert found["unscored"].value == 3


@pytest.mark.parametrize(
    ("kind", "part", "count"),
    [("answer", "correct", 1), ("answer", "mine.brief", 0), ("functions", "mine.brief", 1)],
)
def test_a_function_that_fails_beside_what_is_right_leaves_no_doubt_of_that(
    kind: str, part: str, count: int
) -> None:
    made = group([{"correct": 0.0, "error": 1.0}])
    asked = replace(made.group.prompt, reward={"kind": kind})
    made = replace(made, group=replace(made.group, prompt=asked), notes_G=({part: "error: x"},))
    assert evaluation([made])["unscored"].value == count


def test_a_group_of_which_nothing_came() -> None:
    found = evaluation([group([], ["late", "late"]), group([{"correct": 1.0}])])
    assert found["pass@1"].value == 1 / 3
    assert math.isnan(evaluation([])["pass@1"].value)


def test_a_whole_score_passes_whatever_order_its_parts_were_added_up_in() -> None:
    assert passed(1.0)
    assert passed(sum([0.1] * 10))  # 0.9999999999999999
    assert passed(sum([1 / 49] * 49))


@pytest.mark.parametrize("partial", [0.0, 0.5, 0.999, 1999 / 2000, 0.9999999, math.nan])
def test_partial_credit_is_no_pass_however_near_it_comes(partial: float) -> None:
    assert not passed(partial)


@pytest.mark.parametrize("passes", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_all_choices_of_k_with_a_pass(passes: int, k: int) -> None:
    right = [True] * passes + [False] * (5 - passes)
    choices = list(itertools.combinations(right, k))
    assert pass_at_k(5, passes, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize("k", [0, 6])
def test_pass_at_k_needs_k_completions(k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of 5 completions"):
        pass_at_k(5, 1, k)
