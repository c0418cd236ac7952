"""Worked answers to questions of reasoning_gym."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from keel.configs.schema import ConfigError, ConversationsConfig
from keel.data.conversations.types import Example, Read
from keel.data.procedural import GENERATOR_ERRORS, check_params

FAR = 1 << 41
"""Added to the seed of the questions, far from any seed that a recipe gives its prompts."""
STRIDE = 1 << 20
"""From one run seed's questions to the next one's."""
Solve = Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None]
"""The assistant's message that answers an entry of a task; None for one that nobody has taught."""


def worked_solutions(source: ConversationsConfig, solve: Solve, *, seed: int) -> Read:
    """`source.size` questions with their answers, those left out that nobody has taught; seeded by
    `params.seed`, or by the run's seed. Raises ConfigError for a task that reasoning_gym does not
    make so, or of which none is left."""
    # Builds a hundred tasks: only who uses it pays.
    from reasoning_gym import factory  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    knob = f"sft.sources[{source.name}]"
    if known := cast(Mapping[str, Any], factory.DATASETS).get(source.task):
        check_params(knob, known[1], source.params)
    params = {"seed": FAR + seed * STRIDE, **source.params, "size": source.size}
    try:
        entries = list(factory.create_dataset(source.task, **params))
    except GENERATOR_ERRORS as error:
        raise ConfigError(f"{knob}: reasoning_gym's {source.task}: {error}") from error
    examples: list[Example] = []
    for index, entry in enumerate(entries):
        said = solve(source.task, entry)
        if said is None:
            continue
        if source.thinking == "without":
            said = {key: value for key, value in said.items() if key != "reasoning_content"}
        asked = [{"role": "user", "content": str(entry["question"])}]
        if source.system:
            asked.insert(0, {"role": "system", "content": source.system})
        examples.append(
            Example(
                origin=f"{source.task}, question {index}",
                messages=(*asked, said),
                trained=(len(asked),),
                thinking=source.thinking != "without",
            )
        )
    if not examples:
        raise ConfigError(
            f"{knob}.task = {source.task!r}: nobody has worked solutions of it "
            "(model/tiny/solutions.py has those of a few); take another, or a file of yours"
        )
    return Read(examples=tuple(examples), unselected={"not taught": len(entries) - len(examples)})
