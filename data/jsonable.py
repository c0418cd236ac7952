"""Python values as JSON, without losing what JSON has no word for.

Verifiers compare types: a grid of tuples is not a grid of lists, and `{1: …}` is not `{"1": …}`.
Such values are written as `{"~tuple": […]}`; `keel.rewards.code.call_driver` reads them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast

import numpy as np

Json = Any
"""None, bool, int, float, str, lists of these, and dicts of these with text keys."""


def to_jsonable(value: Any, path: str = "value") -> Json:
    """`value` in terms of JSON. Raises TypeError naming the path of what cannot be written."""
    if isinstance(value, np.generic):  # np.int64 is no int
        value = cast(Any, value).item()
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return _each(cast(list[Any], value), path)
    if isinstance(value, tuple):
        return {"~tuple": _each(list(cast(tuple[Any, ...], value)), path)}
    if isinstance(value, (set, frozenset)):
        members = cast(set[Any], value)
        return {"~set": _each(sorted(members, key=repr), path)}
    if isinstance(value, (Decimal, Fraction)):
        return {f"~{type(value).__name__.lower()}": str(value)}
    if isinstance(value, Mapping):
        pairs = list(cast(Mapping[Any, Any], value).items())
        if all(isinstance(key, str) and not key.startswith("~") for key, _ in pairs):
            return {str(key): to_jsonable(item, f"{path}.{key}") for key, item in pairs}
        written = [[to_jsonable(k, path), to_jsonable(v, f"{path}[{k!r}]")] for k, v in pairs]
        return {"~dict": written}
    raise TypeError(f"{path} holds a {type(value).__name__}, which cannot be written as JSON")


def _each(items: list[Any], path: str) -> list[Json]:
    return [to_jsonable(item, f"{path}[{index}]") for index, item in enumerate(items)]
