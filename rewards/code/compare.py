"""Compares the output of a program with the expected output. The output is untrusted, so both sides
are plain data without a custom `__eq__`, and the duration of a comparison is limited by the size of
the expected value."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, TypeGuard, cast

_REL_TOLERANCE = 1e-9
"""Default relative tolerance for comparing floating-point numbers."""
_MAX_COMPARISONS = 500_000
"""Maximum number of comparisons between unordered items. They take a few tenths of a second."""
_WHOLE = re.compile(r"[+-]?[0-9]+")


def same_value(expected: Any, value: Any, tolerance: float | None = None) -> bool:
    """Return whether two values in the JSON form of `keel.rewards.code.call_driver` are equal.

    A list equals a tuple with the same items. The order of sets and dicts does not matter. A number
    never equals a boolean. Two integers must be exactly equal. Other numbers may differ by up to
    `tolerance` or, unless the expected number is an integer, by up to `tolerance` times that
    number. Values that would need more than `_MAX_COMPARISONS` comparisons count as different.
    """
    return _Comparison(tolerance).same(expected, value)


class _Comparison:
    def __init__(self, tolerance: float | None) -> None:
        self._tolerance = tolerance
        self._budget = _MAX_COMPARISONS

    def same(self, expected: Any, value: Any) -> bool:
        if _is_number(expected) and _is_number(value):
            return _close(expected, value, self._tolerance)
        kind, left = _items_of(expected)
        other, right = _items_of(value)
        if kind != other or kind == "?":  # malformed
            return False
        if kind == "":
            return type(expected) is type(value) and expected == value
        if len(left) != len(right):
            return False
        if kind != "~tuple":
            return self._same_unordered(left, right)
        return all(map(self.same, left, right))

    def _same_unordered(self, expected: list[Any], value: list[Any]) -> bool:
        """Match the items after sorting both sides. Items that rounding has moved are matched one
        by one."""
        expected, value = sorted(expected, key=_sort_key), sorted(value, key=_sort_key)
        pairs = zip(expected, value, strict=True)
        differing = [i for i, (one, two) in enumerate(pairs) if not self.same(one, two)]
        if differing and not any(isinstance(v, float) for v in _values_in([expected, value])):
            return False
        remaining = list(differing)
        for i in differing:
            for j in remaining:
                self._budget -= 1 + sum(1 for _ in _values_in([expected[i], value[j]]))
                if self._budget < 0:
                    return False
                if self.same(expected[i], value[j]):
                    remaining.remove(j)
                    break
            else:
                return False
        return True


def same_text(expected: str, output: str, tolerance: float | None = None) -> bool:
    """Return whether two outputs are equal, ignoring white space at the end of lines and of the
    text. If `tolerance` is set, the outputs are compared word by word, and numbers may differ as in
    `same_value`."""
    if tolerance is None:
        return _lines(expected) == _lines(output)
    left, right = expected.split(), output.split()
    return len(left) == len(right) and all(
        a == b or _close_words(a, b, tolerance) for a, b in zip(left, right, strict=True)
    )


def min_output(expected: str, tolerance: float | None = None) -> int:
    """Return the size in bytes of the shortest output that `same_text` would accept."""
    if tolerance is None:
        return len("\n".join(_lines(expected)).encode(errors="replace"))
    return max(0, 2 * len(expected.split()) - 1)  # a number may be written in fewer digits


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _close(expected: int | float, value: int | float, tolerance: float | None) -> bool:
    if isinstance(expected, int) and isinstance(value, int):
        return expected == value
    try:
        left, right = float(expected), float(value)
    except OverflowError:  # an integer beyond floating point
        return False
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    return _near(left, right, tolerance, whole=isinstance(expected, int))


def _near(expected: float, value: float, tolerance: float | None, *, whole: bool) -> bool:
    if expected == value:
        return True
    difference = abs(expected - value)
    if not math.isfinite(difference):
        return False
    if tolerance is None:
        most = _REL_TOLERANCE * abs(expected)
        return difference <= (min(most, 1e-6) if whole else max(most, 1e-12))
    return difference <= tolerance * (1.0 if whole else max(1.0, abs(expected)))


def _close_words(expected: str, value: str, tolerance: float) -> bool:
    whole = _WHOLE.fullmatch(expected) is not None
    if whole and _WHOLE.fullmatch(value):
        return int(expected) == int(value) if max(len(expected), len(value)) < 4000 else False
    if not value.isascii() or "_" in value:  # numbers to Python only
        return False
    try:
        left, right = float(expected), float(value)
    except ValueError:
        return False
    return _near(left, right, tolerance, whole=whole)


def _items_of(value: Any) -> tuple[str, list[Any]]:
    """Return the kind of a collection and its items. The kind is "" if the value is not a
    collection, and "?" if it is malformed."""
    if isinstance(value, list):
        return "~tuple", cast(list[Any], value)
    if not isinstance(value, dict):
        return "", []
    items = cast(dict[str, Any], value)
    if len(items) == 1:
        ((key, content),) = items.items()
        if key in ("~tuple", "~set", "~dict"):
            return (key, cast(list[Any], content)) if isinstance(content, list) else ("?", [])
    return "~dict", [[key, item] for key, item in items.items()]


def _values_in(value: Any) -> Iterator[Any]:
    pending = [value]
    while pending:
        value = pending.pop()
        yield value
        pending += _items_of(value)[1]


def _sort_key(item: Any) -> tuple[int, Any]:
    """Return a sort key for an item. Numbers are sorted by value, so that 9.999999 is next to
    10.0."""
    if _is_number(item):
        return 0, math.inf if math.isnan(item) else item
    kind, inside = _items_of(item)
    if kind in ("", "?"):
        return 1, json.dumps(item)
    keys = [_sort_key(part) for part in inside]
    return 2, (kind, keys if kind == "~tuple" else sorted(keys))
