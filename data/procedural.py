"""Generate prompts and their verifiers from tasks of reasoning_gym."""

import difflib
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast

import numpy as np

from keel.configs.schema import ConfigError, SourceConfig
from keel.data.items import Item, Loaded, add_source_system, digest, make_prompt

_REFUSED_TASKS = {
    "coin_flip": "its verifier accepts a prefix of the right number, such as 0 for 0.1",
    "composite": "list its parts as separate sources, which then have separate metrics",
    "game_of_life_halting": "its verifier accepts every answer that is not empty",
    "puzzle24": "its verifier ignores which numbers to use; take countdown",
}
"""Tasks that Keel refuses because their verifiers can be exploited (reasoning_gym 0.1.25).
`composite` is refused because its parts are better configured as separate sources.
`tests/rewards/rules/test_reasoning_gym.py` tries nonsense answers on all remaining tasks."""

_CACHE: dict[str, Any] = {}
"""Task datasets that have already been built. Building one can require filtering a hundred thousand
words."""


def load_reasoning_gym(source: SourceConfig, *, seed: int) -> Loaded:
    """Generate items 0 to size − 1 of a task. The seed is `params.seed` if set, otherwise the run's
    seed. Item i doesn't depend on `size`. Raises ConfigError if a task or option is unknown."""
    knob = f"data.sources[{source.name}]"
    if source.task in _REFUSED_TASKS:
        raise ConfigError(f"{knob}.task = {source.task!r}: {_REFUSED_TASKS[source.task]}")
    task_seed = int(digest(f"{seed}/{source.name}")[:7], 16)
    dataset = build_task(source.task, source.params, source.size, task_seed, knob)
    return Loaded(items=tuple(_item(source, dataset, index) for index in range(source.size)))


def build_task(task: str, params: Mapping[str, Any], size: int, seed: int, knob: str) -> Any:
    """Build a reasoning_gym dataset with `size` entries. A seed in `params` takes precedence over
    `seed`. Raises ConfigError naming the setting `knob` if a task or option is unknown."""
    # Imported late: it takes a second and builds a hundred tasks.
    from reasoning_gym.factory import (  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
        DATASETS,  # pyright: ignore[reportUnknownVariableType]
    )

    tasks = cast(Mapping[str, tuple[Any, Any]], DATASETS)
    if task not in tasks:
        near = difflib.get_close_matches(task, tasks, n=3) or sorted(tasks)
        raise ConfigError(
            f"{knob}.task = {task!r}: reasoning_gym has no such task; did you mean "
            f"{', '.join(near)}?"
        )
    dataset_type, config_type = tasks[task]
    try:
        config = config_type(size=size, **{"seed": seed, **params})
        if hasattr(config, "validate"):
            config.validate()
        key = f"{dataset_type.__name__}: {config!r}"
        if key not in _CACHE:
            _CACHE[key] = dataset_type(config=config)
    except Exception as error:  # of a generator
        raise ConfigError(f"{knob}.params = {dict(params)}: {error!r}") from error
    return _CACHE[key]


def _item(source: SourceConfig, dataset: Any, index: int) -> Item:
    origin = f"{source.task}[{index}]"
    try:
        entry = dataset[index]
        reward: dict[str, Any] = {
            "kind": "reasoning_gym",
            "task": source.task,
            "params": _to_jsonable(dict(source.params)),
            "entry": {
                "question": str(entry["question"]),
                "answer": None if entry["answer"] is None else str(entry["answer"]),
                "metadata": _to_jsonable(entry["metadata"]),
            },
        }
    except Exception as error:  # of a generator
        raise ConfigError(
            f"data.sources[{source.name}]: {origin} cannot be generated: {error!r}"
        ) from error
    question = [{"role": "user", "content": reward["entry"]["question"]}]
    messages = add_source_system(source, question)
    return Item(prompt=make_prompt(source, index, messages, reward), origin=origin)


def _to_jsonable(value: Any) -> Any:
    """Encode a Python value as JSON without losing its types, because verifiers distinguish `(1,)`
    from `[1]` and `{1: …}` from `{"1": …}`.

    Such values become `{"~tuple": […]}` and so on, and `keel.rewards.code.call_driver` decodes
    them. Raises TypeError for any other type.
    """
    if isinstance(value, np.generic):
        value = cast(Any, value).item()
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return [_to_jsonable(item) for item in cast(list[Any], value)]
    if isinstance(value, tuple):
        return {"~tuple": [_to_jsonable(item) for item in cast(tuple[Any, ...], value)]}
    if isinstance(value, (set, frozenset)):
        return {"~set": [_to_jsonable(item) for item in sorted(cast(set[Any], value), key=repr)]}
    if isinstance(value, (Decimal, Fraction)):
        return {f"~{type(value).__name__.lower()}": str(value)}
    if isinstance(value, Mapping):
        pairs = list(cast(Mapping[Any, Any], value).items())
        if all(isinstance(key, str) and not key.startswith("~") for key, _ in pairs):
            return {str(key): _to_jsonable(item) for key, item in pairs}
        return {"~dict": [[_to_jsonable(key), _to_jsonable(item)] for key, item in pairs]}
    raise TypeError(f"a {type(value).__name__} cannot be encoded")
