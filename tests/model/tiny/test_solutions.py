"""Solutions of the cold start's teacher."""

from __future__ import annotations

import pytest
import reasoning_gym

from keel.model.tiny.solutions import TAUGHT, solution

PARAMS = {
    "basic_arithmetic": {"operators": ["+", "-"], "allow_parentheses": False},
    "chain_sum": {"allow_negation": True},
    "gcd": {"max_numbers": 4},
    "spell_backward": {},
    "spiral_matrix": {"max_n": 6},
}


def answer_of(turn: str) -> str:
    return turn.split("</think>\n\n", 1)[1]


def steps_of(turn: str) -> str:
    return turn.removeprefix("<think>\n").split("\n</think>", 1)[0]


@pytest.mark.parametrize("task", TAUGHT)
def test_worked_solutions_are_right(task: str) -> None:
    dataset = reasoning_gym.create_dataset(task, seed=7, size=300, **PARAMS[task])
    for entry in dataset:
        turn = solution(task, entry, worked=True)
        assert dataset.score_answer(answer_of(turn), entry) == 1.0
        assert steps_of(turn)


@pytest.mark.parametrize("task", TAUGHT)
def test_hasty_solutions_are_mostly_wrong(task: str) -> None:
    dataset = reasoning_gym.create_dataset(task, seed=9, size=300, **PARAMS[task])
    turns = [(solution(task, entry, worked=False), entry) for entry in dataset]
    assert all(steps_of(turn) == "" for turn, _ in turns)
    right = sum(dataset.score_answer(answer_of(turn), entry) == 1.0 for turn, entry in turns)
    assert right < 0.25 * len(turns)
