"""Reads back what `keel.data.jsonable` wrote: `{"~tuple": […]}` and its kin."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast

_READERS: dict[str, Callable[[Any], Any]] = {
    "~tuple": lambda items: tuple(from_jsonable(item) for item in items),
    "~set": lambda items: {from_jsonable(item) for item in items},
    "~dict": lambda pairs: {from_jsonable(key): from_jsonable(value) for key, value in pairs},
    "~decimal": Decimal,
    "~fraction": Fraction,
}


def from_jsonable(value: Any) -> Any:
    """The Python value that `keel.data.jsonable.to_jsonable` was given."""
    if isinstance(value, list):
        return [from_jsonable(item) for item in cast(list[Any], value)]
    if isinstance(value, dict):
        items = cast(dict[str, Any], value)
        if len(items) == 1:
            ((key, content),) = items.items()
            if key in _READERS:
                return _READERS[key](content)
        return {key: from_jsonable(item) for key, item in items.items()}
    return value
