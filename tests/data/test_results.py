"""What an evaluation comes to where completions are handed in as in a contest."""

from __future__ import annotations

from typing import Any

import pytest

from keel.data.results import contest_score


def sample(thinking: int, small: float, large: float, **more: Any) -> dict[str, Any]:
    parts = {"subtask/small": small, "subtask/large": large, **more.pop("parts", {})}
    known = {"correct": small + large, "error": 0.0, "finish_reason": "stop"}
    return {**known, "thinking": thinking, "parts": parts, **more}


def test_the_best_of_each_subtask_over_those_that_thought_longest() -> None:
    samples = [sample(10, 0.3, 0), sample(50, 0, 0.7), sample(90, 0, 0), sample(40, 0.3, 0)]
    scores = [contest_score(samples, n) for n in (1, 2, 3, 4)]
    assert scores == pytest.approx([0, 0.7, 1, 1])  # by hand: 90; then 50, then 40
    assert contest_score([], 3) == 0


@pytest.mark.parametrize(
    "unfit",
    [
        {"parts": {"samples": 0.0}},
        {"parts": {"refusal": 1.0}},
        {"finish_reason": "length"},
        {"error": 1.0},
    ],
)
def test_what_is_not_handed_in_takes_no_place(unfit: dict[str, Any]) -> None:
    samples = [sample(99, 0.3, 0.7, **unfit), sample(1, 0.3, 0)]
    assert contest_score(samples, 1) == pytest.approx(0.3)
    fit = sample(99, 0.3, 0.7, parts={"samples": 1.0, "refusal": 0.0})
    assert contest_score([fit, samples[1]], 1) == pytest.approx(1)


def test_without_subtasks_a_right_one_is_enough() -> None:
    plain = {"error": 0.0, "finish_reason": "stop", "parts": {}}
    samples = [
        {**plain, "correct": 0.0, "thinking": 9},
        {**plain, "correct": 1.0, "thinking": 3},
    ]
    assert [contest_score(samples, n) for n in (1, 2)] == [0, 1]


def test_completions_of_an_older_release_count_in_their_order() -> None:
    plain = {"error": 0.0, "finish_reason": "stop"}  # neither parts nor thinking
    samples = [{**plain, "correct": 0.0}, {**plain, "correct": 1.0}]
    assert [contest_score(samples, n) for n in (1, 2)] == [0, 1]
