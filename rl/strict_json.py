"""Strict JSON for untrusted text. Values can be serialised again, and their nesting is bounded."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from math import isfinite
from typing import Any, NoReturn, cast

MOST_DEEP = 100
"""Levels of nesting."""
MOST_DIGITS = 4300
"""Digits of an integer, which is also CPython's default."""
LONG = 50_000
"""Digits of an integer in data and in the results of programs. Parsing them takes about 50 ms, and
the time grows with their square."""


def allow_long_integers() -> None:
    """Raise this process's limit on the digits of integers in text from 4,300 to `LONG`."""
    sys.set_int_max_str_digits(LONG)


def load(text: str | bytes, *, most_deep: int = MOST_DEEP) -> Any:
    """Parse JSON. Raises ValueError for any fault, also for NaN, numbers beyond floating point,
    more than MOST_DIGITS digits and deep nesting."""
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite, parse_int=_short)
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


def _short(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits; {MOST_DIGITS} are the most")
    return int(text)


def _finite(text: str) -> float:
    if not isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return number
