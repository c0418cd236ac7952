"""Conversations that show worked solutions to reasoning_gym questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from keel.configs.schema import ConfigError, ConversationsConfig
from keel.data.conversations.types import Example, ReadSource
from keel.data.procedural import build_task

_SEED_OFFSET = 1 << 41
"""Added to the seed so that these questions differ from those in a recipe's prompts."""
_SEED_STRIDE = 1 << 20
"""The distance between the questions for consecutive run seeds."""
Solve = Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None]
"""Returns the assistant's message for a task and entry, or None if no solution is known."""


def worked_solutions(source: ConversationsConfig, solve: Solve, *, seed: int) -> ReadSource:
    """Generate `source.size` questions and keep those whose solution is known.

    The seed is `params.seed`, or else the run's seed. Raises ConfigError if reasoning_gym rejects
    the task, or if no question has a known solution.
    """
    knob = f"sft.sources[{source.name}]"
    task_seed = _SEED_OFFSET + seed * _SEED_STRIDE
    entries = list(build_task(source.task, source.params, source.size, task_seed, knob))
    examples: list[Example] = []
    for index, entry in enumerate(entries):
        solution = solve(source.task, entry)
        if solution is None:
            continue
        if source.thinking == "without":
            solution = {k: value for k, value in solution.items() if k != "reasoning_content"}
        messages = [{"role": "user", "content": str(entry["question"])}]
        if source.system:
            messages.insert(0, {"role": "system", "content": source.system})
        examples.append(
            Example(
                origin=f"{source.task}, question {index}",
                messages=(*messages, solution),
                trained=(len(messages),),
                thinking=source.thinking != "without",
            )
        )
    if not examples:
        raise ConfigError(
            f"{knob}.task = {source.task!r}: no worked solutions of this task exist "
            "(model/tiny/solutions.py has a few tasks); choose another task, or use a file"
        )
    return ReadSource(
        examples=tuple(examples), unselected={"not taught": len(entries) - len(examples)}
    )
