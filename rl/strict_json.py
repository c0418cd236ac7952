"""JSON as the standard has it, of what a policy or a stranger wrote: it can be written down again,
and whatever reads it level by level, on a stack, comes to its end."""

from __future__ import annotations

import json
from collections.abc import Collection
from math import isfinite
from typing import Any, NoReturn, cast

MOST_DEEP = 100
"""Levels."""


def load(text: str | bytes, *, most_deep: int = MOST_DEEP) -> Any:
    """Raises ValueError, whatever is wrong with it: Python's own reader takes NaN, reads 1e999 as
    infinity, and has errors of its own for what is nested deep."""
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    level = [value]
    for _ in range(most_deep):
        level = [item for value in level for item in _inside(value)]
        if not level:
            return value
    raise ValueError(f"nested too deep, more than {most_deep} levels")


def _inside(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return cast(dict[str, Any], value).values()
    return cast(list[Any], value) if isinstance(value, list) else ()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    if not isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return number
