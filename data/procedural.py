"""Prompts from reasoning_gym: procedural tasks that come with their own verifiers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from keel.configs.schema import ConfigError, SourceConfig
from keel.data.items import Item, Loaded, digest, told
from keel.data.jsonable import to_jsonable
from keel.rl.types import Prompt

REFUSED_TASKS = {
    "coin_flip": "its verifier gives full marks to a prefix of the right number: 0 for 0.1",
    "composite": "list its parts as sources of their own, each with metrics of its own",
    "game_of_life_halting": "its verifier accepts every answer that is not empty",
    "puzzle24": "its verifier does not ask which numbers were given; take countdown",
}
"""Tasks that a policy could only learn to cheat at, or that Keel does better. Verifiers of
reasoning_gym 0.1.25; `tests/rewards/rules/test_rules.py` tries nonsense on all the others."""

GENERATOR_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


KEPT = 4
"""Tasks that stay made: the commands of one process have the same sources, and making one may mean
to sift a hundred thousand words. What an item is depends on its number alone."""
_KEPT: dict[str, Any] = {}


def load_reasoning_gym(source: SourceConfig, *, seed: int) -> Loaded:
    """Items 0 … size−1 of a task. The generator is seeded by `params.seed`, or by the run's seed.

    Item i does not depend on `size`, so a larger source begins with the items of a smaller one.
    Raises ConfigError for an unknown task and for options the task does not take.
    """
    # Importing it takes a second and builds a hundred tasks: only runs that use it pay.
    from reasoning_gym.factory import (  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
        DATASETS,  # pyright: ignore[reportUnknownVariableType]
    )

    tasks = cast(Mapping[str, tuple[Any, Any]], DATASETS)
    knob = f"data.sources[{source.name}]"
    if source.task in REFUSED_TASKS:
        raise ConfigError(f"{knob}.task = {source.task!r}: {REFUSED_TASKS[source.task]}")
    if source.task not in tasks:
        near = difflib.get_close_matches(source.task, tasks, n=3) or sorted(tasks)
        raise ConfigError(
            f"{knob}.task = {source.task!r}: reasoning_gym has no such task; did you mean "
            f"{', '.join(near)}?"
        )
    dataset_type, config_type = tasks[source.task]
    params = {"seed": int(digest(f"{seed}/{source.name}")[:7], 16), **source.params}
    check_params(knob, config_type, source.params)
    try:
        config = config_type(size=source.size, **params)
        if hasattr(config, "validate"):
            config.validate()
        dataset = _made(dataset_type, config)
    except GENERATOR_ERRORS as error:
        raise ConfigError(f"{knob}.params = {dict(source.params)}: {_say(error)}") from error
    return Loaded(items=tuple(_item(source, dataset, index) for index in range(source.size)))


def _made(dataset_type: type, config: Any) -> Any:
    key = f"{dataset_type.__name__}: {config!r}"
    if key not in _KEPT:
        made = dataset_type(config=config)
        while len(_KEPT) >= KEPT:
            del _KEPT[next(iter(_KEPT))]
        _KEPT[key] = made
    return _KEPT[key]


def check_params(knob: str, config_type: type, params: Mapping[str, Any]) -> None:
    """Raises ConfigError for what is no option of a task, and for `size`, a knob of the source."""
    options = [field.name for field in fields(config_type) if field.name != "size"]
    for name in params:
        if name == "size":
            raise ConfigError(f"{knob}.params.size: write {knob}.size instead")
        if name not in options:
            near = difflib.get_close_matches(name, options, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(options)}"
            raise ConfigError(f"{knob}.params.{name}: the task has no such option; {hint}")


def _item(source: SourceConfig, dataset: Any, index: int) -> Item:
    origin = f"{source.task}[{index}]"
    try:
        entry = dataset[index]
        reward: dict[str, Any] = {
            "kind": "reasoning_gym",
            "task": source.task,
            "params": to_jsonable(dict(source.params), "params"),
            "entry": {
                "question": str(entry["question"]),
                "answer": None if entry["answer"] is None else str(entry["answer"]),
                "metadata": to_jsonable(entry["metadata"], "metadata"),
            },
        }
    except GENERATOR_ERRORS as error:
        raise ConfigError(
            f"data.sources[{source.name}]: {origin} cannot be made: {_say(error)}"
        ) from error
    prompt = Prompt(
        prompt_id=f"{source.name}/{index}",
        domain=source.domain_name,
        messages=told(source, [{"role": "user", "content": reward["entry"]["question"]}]),
        thinking=source.thinking,
        reward=reward,
        kl_coef=source.kl_coef,
        environment=source.name if source.environment.enabled else "",
        raw=source.raw,
    )
    return Item(prompt=prompt, origin=origin)


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
