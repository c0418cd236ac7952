"""Encodes Python values as JSON without loss.

Verifiers compare types: a grid of tuples is not a grid of lists, and `{1: …}` is not `{"1": …}`.
Such values are therefore encoded like `{"~tuple": […]}`, and `keel.rewards.code.call_driver`
decodes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast

import numpy as np

_Json = Any
"""None, bool, int, float, str, and lists and dicts of these. Dict keys are strings."""


def to_jsonable(value: Any, path: str = "value") -> _Json:
    """Encode a Python value as JSON data.

    Raises TypeError with the path to an unsupported value.
    """
    if isinstance(value, np.generic):
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
        return {
            "~dict": [[to_jsonable(k, path), to_jsonable(v, f"{path}[{k!r}]")] for k, v in pairs]
        }
    raise TypeError(f"{path} holds a {type(value).__name__}, which cannot be encoded")


def _each(items: list[Any], path: str) -> list[_Json]:
    return [to_jsonable(item, f"{path}[{index}]") for index, item in enumerate(items)]
