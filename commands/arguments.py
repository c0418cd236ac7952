"""Check the arguments of `keel.train` and convert them to recipe notation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite, isnan
from pathlib import PurePath
from typing import Any, cast

from keel.configs.dump import quoted
from keel.configs.load import split_overrides
from keel.configs.schema import ConfigError

Reward = Callable[[Any, Any], Any]
REWARDS = (
    "a function, a list of them, or weights of functions and of parts: "
    '{"correct": 1.0, my_function: 0.2}'
)
SHOWN = 60
"""Maximum number of characters of a value quoted in a message."""


def overrides_of(knobs: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Convert the `knobs` argument to command-line overrides, one per knob. Raises ConfigError if
    it is malformed."""
    if isinstance(knobs, Mapping):
        overrides = [f"{knob}={as_value(value, f'knobs={knob}')}" for knob, value in knobs.items()]
        return split_overrides(overrides)
    several = isinstance(cast(object, knobs), Iterable) and not isinstance(knobs, str)
    listed = list(knobs) if several else []
    if not several or not all(isinstance(cast(object, one), str) for one in listed):
        raise ConfigError(
            f"keel.train(knobs={short(knobs)}): must be a list of texts, or a mapping: "
            '["run.steps=20"], or {"run.steps": 20}'
        )
    return split_overrides(listed)


def as_value(value: Any, of: str) -> str:
    """Write a Python value as the right-hand side of an override. `of` names the argument in error
    messages."""
    return quoted(plain_data(value, of))


def plain_data(value: Any, of: str) -> Any:
    """Convert a knob value or a recipe to plain lists, mappings and scalars."""

    def plain(one: Any) -> Any:
        if hasattr(one, "tolist"):
            return one.tolist()
        if isinstance(one, Mapping):
            return dict(cast(Mapping[Any, Any], one))
        if isinstance(one, PurePath):
            return str(one)
        raise TypeError(f"a {type(one).__name__} is not a value of a recipe")

    try:
        return json.loads(json.dumps(value, default=plain))
    except (TypeError, ValueError) as error:  # also circular values
        raise ConfigError(f"keel.train({of}): {error}") from error


def held_out(holdout: Any) -> int:
    """Return the number of prompts to hold out. Raises ConfigError if the argument is invalid."""
    number = holdout.item() if hasattr(holdout, "item") else holdout
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ConfigError(
            f"keel.train(holdout={short(holdout)}): must be a number of prompts to hold out, at "
            "least 0"
        )
    return number


def short(value: Any) -> str:
    """Return the `repr` of a value, shortened for messages."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def rows_of(prompts: Any) -> Iterator[dict[str, Any]]:
    """Yield the prompts as rows in the format of a JSONL source."""
    if hasattr(prompts, "to_dict") and hasattr(prompts, "columns"):  # pandas
        prompts = prompts.to_dict(orient="records")
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
        kind = type(cast(object, prompts)).__name__
        raise ConfigError(
            f"keel.train(prompts=…): must be rows, not one {kind}. Give a list, "
            '[{"prompt": "…", "answer": "…"}, …]. A file of prompts is a source of the recipe '
            "(data.sources, docs/data.md)"
        )
    for number, row in enumerate(cast(Iterable[Any], prompts), start=1):
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, Mapping):
            kind = type(row).__name__
            raise ConfigError(
                f"keel.train(prompts=…): row {number} is a {kind}. Give a mapping of columns, or a "
                "text"
            )
        columns = _filled(cast(Mapping[str, Any], row))
        if isinstance(turns := columns.get("prompt"), (list, tuple)):  # TRL's format
            del columns["prompt"]
            columns["messages"] = list(cast(Sequence[Any], turns))
        if isinstance(turns := columns.get("messages"), (list, tuple)):
            each = cast(Sequence[Any], turns)
            columns["messages"] = [_filled(m) if isinstance(m, Mapping) else m for m in each]
        yield columns


def _filled(row: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the nulls with which tables fill missing columns."""
    columns = {key: one.tolist() if hasattr(one, "tolist") else one for key, one in row.items()}
    return {key: one for key, one in columns.items() if not _null(one)}


def _null(value: Any) -> bool:
    """Return whether a value is None, NaN, or pandas' NaT or NA."""
    if isinstance(value, float):
        return isnan(value)
    return value is None or type(value).__name__ in ("NaTType", "NAType")


def as_json(value: Any) -> Any:
    """Convert numpy values and times to types that JSON can represent."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def weights_of(rewards: Any) -> list[tuple[Any, float]]:
    """Return the reward functions or part names with their weights. The result is a list because
    functions may be unhashable. Raises ConfigError if the argument is invalid."""
    if isinstance(rewards, Mapping):
        pairs = list(cast(Mapping[Any, Any], rewards).items())
    elif callable(rewards):
        pairs = [(rewards, 1.0)]
    elif isinstance(rewards, str) or not isinstance(rewards, Iterable):
        raise ConfigError(f"keel.train(rewards={short(rewards)}): must be {REWARDS}")
    else:
        pairs = [(one, 1.0) for one in cast(Iterable[Any], rewards)]
    if not pairs:
        raise ConfigError(
            f"keel.train(rewards={short(rewards)}): is empty. Omit it to use the recipe's, or "
            f"give {REWARDS}"
        )
    return [(_part(part), _weight(part, weight)) for part, weight in pairs]


def _part(part: Any) -> Any:
    if not callable(part) and not isinstance(part, str):
        raise ConfigError(
            f"keel.train(rewards=…): {short(part)} is not a function or a part's name. Give "
            f"{REWARDS}"
        )
    return part


def _weight(part: Any, weight: Any) -> float:
    number = weight.item() if hasattr(weight, "item") else weight
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not isfinite(number):
        name = part if isinstance(part, str) else getattr(part, "__name__", short(part))
        swapped = ". The function comes before its weight" if callable(weight) else ""
        raise ConfigError(
            f"keel.train(rewards=…): the weight of {name} is {short(weight)}: must be a finite "
            f"number, such as 0.2{swapped}"
        )
    return number
