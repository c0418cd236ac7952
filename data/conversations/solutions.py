"""Conversations that show worked solutions to reasoning_gym questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from keel.configs.schema import ConfigError, ConversationsConfig
from keel.data.conversations.types import Example, ReadSource
from keel.data.procedural import GENERATOR_ERRORS, check_params

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
    # Importing builds a hundred tasks.
    from reasoning_gym import factory  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    knob = f"sft.sources[{source.name}]"
    if known := cast(Mapping[str, Any], factory.DATASETS).get(source.task):
        check_params(knob, known[1], source.params)
    params = {"seed": _SEED_OFFSET + seed * _SEED_STRIDE, **source.params, "size": source.size}
    try:
        entries = list(factory.create_dataset(source.task, **params))
    except GENERATOR_ERRORS as error:
        raise ConfigError(f"{knob}: reasoning_gym's {source.task}: {error}") from error
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
