"""Maps the columns in a file to the keys of a prompt or a conversation.

`columns` says which column contains a key, as in `{prompt: question, answer: solution}`. A name
with a dot refers to a value inside an object (`answer: reward_model.ground_truth`). An empty name
means that the file does not have the key, even if a column has the same name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, cast

from keel.configs.schema import ConfigError
from keel.data.rows.read import BadLine, kind_of

MISSING: Any = object()


def check_keys(columns: Mapping[str, str], known: Collection[str], knob: str) -> None:
    """Raise ConfigError if `columns` contains an unknown key."""
    for key in columns:
        if key not in known:
            raise ConfigError(f"{knob}.columns.{key}: unknown key; use {', '.join(sorted(known))}")


def picked(record: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the keys in `columns`. A null value counts as missing."""
    values = {key: look_up(record, name) for key, name in columns.items() if name}
    return {k: v for k, v in values.items() if v is not None and v is not MISSING}


def look_up(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column or a dotted path into an object, or `MISSING`."""
    if name in record or "." not in name:
        return record.get(name, MISSING)
    value: Any = record
    for step in name.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return MISSING
        value = cast(Mapping[str, Any], value)[step]
    return value


def parse_json(key: str, text: str) -> Any:
    """Parse a table cell as JSON. Raises BadLine if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"`{key}` must be JSON, is {kind_of(text)}: {error}") from error


def without_nulls(value: Any) -> Any:
    """Remove null values from objects. Tables contain them for keys that occur only in other
    rows."""
    if isinstance(value, dict):
        pairs = cast(dict[str, Any], value).items()
        return {key: without_nulls(each) for key, each in pairs if each is not None}
    return [without_nulls(v) for v in cast(list[Any], value)] if isinstance(value, list) else value
