"""Generated prompts: tasks from reasoning_gym with their verifiers, and environment episodes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from keel.configs.schema import ConfigError, SourceConfig
from keel.data.items import Item, Loaded, digest, with_source_system
from keel.data.jsonable import to_jsonable
from keel.rl.types import ENVIRONMENT, Prompt

REFUSED_TASKS = {
    "coin_flip": "its verifier accepts a prefix of the right number, such as 0 for 0.1",
    "composite": "list its parts as separate sources, which then have separate metrics",
    "game_of_life_halting": "its verifier accepts every answer that is not empty",
    "puzzle24": "its verifier ignores which numbers to use; take countdown",
}
"""Tasks that Keel refuses because their verifiers can be exploited (reasoning_gym 0.1.25).

Some others are refused because they are better configured as a source of their own.
`tests/rewards/rules/test_reasoning_gym.py` tries nonsense answers on all tasks that remain.
"""

GENERATOR_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

_MAX_CACHED = 4
"""How many task datasets to cache. Building one may mean filtering a hundred thousand words."""
_CACHE: dict[str, Any] = {}


def load_reasoning_gym(source: SourceConfig, *, seed: int) -> Loaded:
    """Generate items 0 to size − 1 of a task, with the seed `params.seed` or else the run's seed.

    Item i does not depend on `size`. Raises ConfigError for an unknown task or option.
    """
    # Imported late: it takes a second and builds a hundred tasks.
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
        dataset = _cached_dataset(dataset_type, config)
    except GENERATOR_ERRORS as error:
        raise ConfigError(f"{knob}.params = {dict(source.params)}: {_describe(error)}") from error
    return Loaded(items=tuple(_item(source, dataset, index) for index in range(source.size)))


def _cached_dataset(dataset_type: type, config: Any) -> Any:
    key = f"{dataset_type.__name__}: {config!r}"
    if key not in _CACHE:
        dataset = dataset_type(config=config)
        while len(_CACHE) >= _MAX_CACHED:
            del _CACHE[next(iter(_CACHE))]
        _CACHE[key] = dataset
    return _CACHE[key]


def check_params(knob: str, config_type: type, params: Mapping[str, Any]) -> None:
    """Check the options for a task.

    Raises ConfigError for an unknown option, and for `size`, which is a setting of the source.
    """
    options = [field.name for field in fields(config_type) if field.name != "size"]
    for name in params:
        if name == "size":
            raise ConfigError(f"{knob}.params.size: write {knob}.size instead")
        if name not in options:
            near = difflib.get_close_matches(name, options, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(options)}"
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
            f"data.sources[{source.name}]: {origin} cannot be generated: {_describe(error)}"
        ) from error
    prompt = Prompt(
        prompt_id=f"{source.name}/{index}",
        domain=source.domain_name,
        messages=with_source_system(
            source, [{"role": "user", "content": reward["entry"]["question"]}]
        ),
        thinking=source.thinking,
        reward=reward,
        kl_coef=source.kl_coef,
        environment=source.name if source.environment.enabled else "",
        raw=source.raw,
    )
    return Item(prompt=prompt, origin=origin)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def load_episodes(source: SourceConfig) -> Loaded:
    """Return prompts for tasks 0 to size − 1 of an environment that opens the conversation itself.

    The message in each prompt only names the task, and the environment has to replace it.
    `keel.agents.probe` refuses an environment that does not.
    """
    items: list[Item] = []
    for index in range(source.size):
        name = f"{source.name}/{index}"
        prompt = Prompt(
            prompt_id=name,
            domain=source.domain_name,
            messages=({"role": "user", "content": f"(task {name})"},),
            thinking=source.thinking,
            reward={"kind": ENVIRONMENT},
            kl_coef=source.kl_coef,
            environment=source.name,
        )
        items.append(Item(prompt=prompt, origin=name))
    return Loaded(items=tuple(items))
