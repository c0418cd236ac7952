"""Whether what a program said is what a test wants.

The wanted value comes from the prompt; the other was written by a program that nobody vouches for.
So both are plain data, nothing of it is built into objects that could have opinions of their own,
and the work follows the wanted value's shape: the other cannot make it long.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

REL_TOLERANCE = 1e-9
"""Between floating-point numbers, unless the prompt says otherwise."""
MOST_LOOKS = 500_000
"""At values, where rounding has changed the order of items that have none: some tenths of a second.
Enough for 300 pairs whose first components are all equal but for that, and for any number of them
where few are."""
_WHOLE = re.compile(r"[+-]?[0-9]+")


def same_value(wanted: Any, given: Any, tolerance: float | None = None) -> bool:
    """Whether two values in the JSON form of `keel.rewards.code.call_driver` are equal.

    Lists and tuples are alike; sets and dicts have no order; a number is no boolean. tolerance:
    absolute or relative to the wanted number; absolute alone where that is an integer, and none
    between two integers. What `MOST_LOOKS` looks do not show to be equal is not.
    """
    try:
        return _same(wanted, given, tolerance, _Looks(MOST_LOOKS))
    except _TooMany:
        return False


class _TooMany(Exception):
    pass


@dataclass(slots=True)
class _Looks:
    """At values, out of their order."""

    left: int

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise _TooMany


def _same(wanted: Any, given: Any, tolerance: float | None, looks: _Looks) -> bool:
    if _is_number(wanted) and _is_number(given):
        return _close(wanted, given, tolerance)
    if _is_pair(wanted, given, list):
        kind, left, right = "~tuple", cast(list[Any], wanted), cast(list[Any], given)
    else:
        kind, left = _taken_apart(wanted)
        other, right = _taken_apart(given)
        if kind != other or kind == "?":  # whatever that was to be, it is no value
            return False
    if kind == "":
        return type(wanted) is type(given) and wanted == given
    if len(left) != len(right):
        return False
    if kind != "~tuple":
        return _Items(left, right, tolerance, looks).same()
    return all(_same(a, b, tolerance, looks) for a, b in zip(left, right, strict=True))


class _Items:
    """As many items as are wanted, both without an order. Sorted, equal ones stand in one place, or
    near it where rounding has changed the order; then each is looked for."""

    def __init__(
        self, wanted: list[Any], given: list[Any], tolerance: float | None, looks: _Looks
    ) -> None:
        self._wanted, self._given = sorted(wanted, key=_place), sorted(given, key=_place)
        self._tolerance, self._looks = tolerance, looks
        self._at: dict[int, int] = {}  # from the wanted to the given
        self._of: dict[int, int] = {}  # and back

    def same(self) -> bool:
        alone: list[int] = []
        for i, (wanted, given) in enumerate(zip(self._wanted, self._given, strict=True)):
            if _same(wanted, given, self._tolerance, self._looks):
                self._at[i] = self._of[i] = i
            else:
                alone.append(i)
        if not alone:
            return True
        rounded = any(isinstance(one, float) for one in _inside([self._wanted, self._given]))
        return rounded and all(map(self._found, alone))

    def _found(self, first: int) -> bool:
        """Whether one that is alone has a partner, where others may have to take another one: the
        shortest augmenting path of a bipartite matching."""
        reached: dict[int, int] = {}  # of the given, and from which
        pending = deque([first])
        while pending:
            i = pending.popleft()
            for j in self._near(i):
                if j in reached or not self._fit(i, j):
                    continue
                reached[j] = i
                if j in self._of:
                    pending.append(self._of[j])
                    continue
                while True:  # all on the way take the one that they have reached
                    i = reached[j]
                    before = self._at.get(i, -1)
                    self._at[i], self._of[j] = j, i
                    if i == first:
                        return True
                    j = before
        return False

    def _near(self, i: int) -> Iterator[int]:
        """All places, those around `i` first."""
        for distance in range(len(self._given)):
            for j in (i + distance, i - distance) if distance else (i,):
                self._looks.take(1)
                if 0 <= j < len(self._given):
                    yield j

    def _fit(self, i: int, j: int) -> bool:
        wanted, given = self._wanted[i], self._given[j]
        self._looks.take(sum(1 for _ in _inside([wanted, given])))
        return _same(wanted, given, self._tolerance, self._looks)


def same_text(wanted: str, given: str, tolerance: float | None = None) -> bool:
    """Whether a program's output is `wanted`, up to white space at the ends of lines and of all.

    tolerance: compares word by word, numbers up to so much, as `same_value` does.
    """
    if tolerance is None:
        return _lines(wanted) == _lines(given)
    left, right = wanted.split(), given.split()
    return len(left) == len(right) and all(
        a == b or _close_words(a, b, tolerance) for a, b in zip(left, right, strict=True)
    )


def least_output(wanted: str, tolerance: float | None = None) -> int:
    """Bytes that any output which `same_text` takes for `wanted` has."""
    if tolerance is None:
        return len("\n".join(_lines(wanted)).encode(errors="replace"))
    return max(0, 2 * len(wanted.split()) - 1)  # a number may be written in fewer digits


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_pair(wanted: Any, given: Any, kind: type) -> bool:
    return isinstance(wanted, kind) and isinstance(given, kind)


def _close(wanted: int | float, given: int | float, tolerance: float | None) -> bool:
    if isinstance(wanted, int) and isinstance(given, int):
        return wanted == given
    try:
        left, right = float(wanted), float(given)
    except OverflowError:  # an integer beyond floating point
        return False
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    return _near(left, right, tolerance, whole=isinstance(wanted, int))


def _near(wanted: float, given: float, tolerance: float | None, *, whole: bool) -> bool:
    """whole: an integer is wanted, of which a share may be many."""
    if wanted == given:
        return True
    difference = abs(wanted - given)
    if not math.isfinite(difference):
        return False
    if tolerance is None:
        most = REL_TOLERANCE * abs(wanted)
        return difference <= (min(most, 1e-6) if whole else max(most, 1e-12))
    return difference <= tolerance * (1.0 if whole else max(1.0, abs(wanted)))


def _close_words(wanted: str, given: str, tolerance: float) -> bool:
    whole = _WHOLE.fullmatch(wanted) is not None
    if whole and _WHOLE.fullmatch(given):
        return int(wanted) == int(given) if max(len(wanted), len(given)) < 4000 else False
    if not given.isascii() or "_" in given:  # digits and numbers to Python alone
        return False
    try:
        left, right = float(wanted), float(given)
    except ValueError:
        return False
    return _near(left, right, tolerance, whole=whole)


def _taken_apart(value: Any) -> tuple[str, list[Any]]:
    """The kind of a collection and what is in it; kind "" for anything else, "?" for what is
    written like a collection and is none."""
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


def _inside(value: Any) -> Iterator[Any]:
    """A value and all that it is made of."""
    pending = [value]
    while pending:
        value = pending.pop()
        yield value
        pending += _taken_apart(value)[1]


def _place(item: Any) -> tuple[int, Any]:
    """Where it stands among others without an order. Numbers stand by value, so that 9.999999 and
    10.0, which may be equal, have the same place."""
    if _is_number(item):
        return 0, math.inf if math.isnan(item) else item
    kind, inside = _taken_apart(item)
    if kind in ("", "?"):
        return 1, json.dumps(item)
    places = [_place(part) for part in inside]
    return 2, (kind, places if kind == "~tuple" else sorted(places))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
