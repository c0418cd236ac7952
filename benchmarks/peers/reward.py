"""Rewards of all systems: distinct words of a completion, or the right last number."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Completions = Sequence[Sequence[Mapping[str, Any]]]


class Answered(Protocol):
    @property
    def answer(self) -> str: ...


class Asked(Protocol):
    @property
    def reward(self) -> Mapping[str, Any]: ...


def variety(prompt: object, trajectory: Answered) -> float:
    """Reward function for Keel: `rewards: {benchmarks.peers.reward.variety: 1.0}`."""
    return distinct(trajectory.answer)


def variety_of_all(completions: Completions, **_: object) -> list[float]:
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


def number(prompt: Asked, trajectory: Answered) -> float:
    """Reward function for Keel: 1 if the last number of the answer is the right one."""
    return float(last_number(trajectory.answer) == prompt.reward["answer"])


def number_of_all(completions: Completions, answer: Sequence[str], **_: object) -> list[float]:
    """Reward function for TRL."""
    texts = [str(messages[-1]["content"]) for messages in completions]
    return [float(last_number(text) == right) for text, right in zip(texts, answer, strict=True)]


def last_number(text: str) -> str | None:
    """Return the last number of a text without separators, or None."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return found[-1].replace(",", "").rstrip(".") if found else None
