"""Reward of all systems: the fraction of distinct words in a completion."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Answered(Protocol):
    @property
    def answer(self) -> str: ...


def variety(prompt: object, trajectory: Answered) -> float:
    """Reward function for Keel: `rewards: {benchmarks.peers.reward.variety: 1.0}`."""
    return distinct(trajectory.answer)


def variety_of_all(completions: Sequence[Sequence[Mapping[str, Any]]], **_: object) -> list[float]:
    """Reward function for TRL."""
    return [distinct(str(messages[-1]["content"])) for messages in completions]


def variety_of_solution(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object = None, **_: object
) -> float:
    """Reward function for verl: `reward.custom_reward_function`."""
    return distinct(solution_str)


def distinct(text: str) -> float:
    words = text.split()
    return len(set(words)) / len(words) if words else 0.0
