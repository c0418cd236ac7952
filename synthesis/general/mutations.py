"""Wrong answers made from a right one."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

from keel.synthesis.general.grounding import every

EMPTY: tuple[Any, ...] = (None, "", [], {}, 0, False, True, "{}", "[]")
MOST = 60
PLAUSIBLE = 24

Place = tuple[str | int, ...]


def mutations(answer: Any) -> list[tuple[str, Any]]:
    """Answers with one thing changed in each, and what: every value, every key and every entry; at
    most `MOST`, evenly chosen."""
    found = list(_changed(answer))
    step = max(1.0, len(found) / MOST)
    return [found[int(n * step)] for n in range(min(len(found), MOST))]


def _changed(answer: Any) -> Iterator[tuple[str, Any]]:
    for path, value in _values(answer, ()):
        where = "".join(f"[{key!r}]" for key in path) or "the answer"
        for other in _others(value):
            yield f"{where} = {other!r}", _with(answer, path, other)
        if isinstance(value, dict):
            fields = cast(dict[str, Any], value)
            yield f"{where} with a further key", _with(answer, path, {**fields, "further": 1})
            for key in fields:
                rest = {k: v for k, v in fields.items() if k != key}
                yield f"{where} without {key!r}", _with(answer, path, rest)
        if isinstance(value, list):
            items = cast(list[Any], value)
            for n in range(len(items)):
                yield f"{where} without entry {n}", _with(answer, path, items[:n] + items[n + 1 :])
            if items:
                yield f"{where} with an entry twice", _with(answer, path, [*items, items[-1]])
                _, other = next(_changed(items[-1]), ("", None))
                yield f"{where} with a further entry", _with(answer, path, [*items, other])


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value + 1, value - 1, None]
    if isinstance(value, float):
        return [value + max(1.0, abs(value)), -value - 1.0, None]
    if isinstance(value, str):
        return [f"{value} or another", f"another or {value}", ""]
    return []


def hollow(answer: Any) -> list[Any]:
    """Answers of the same form with nothing in them."""
    return [every(lambda _: None, answer), every(lambda _: "", answer), every(_zero, answer)]


def _zero(value: Any) -> Any:
    return type(value)() if isinstance(value, str | int | float) else value


def plausible(answer: Any, texts: Sequence[str], seed: int) -> list[Any]:
    """Answers of the same form whose strings are drawn from `texts` and whose numbers are near."""
    draw = random.Random(seed)
    found: list[Any] = []
    leaves = [
        (path, value) for path, value in _values(answer, ()) if isinstance(value, str | int | float)
    ]
    for _ in range(PLAUSIBLE if leaves else 0):
        other = answer
        for path, value in leaves:
            if isinstance(value, str):
                other = _with(other, path, draw.choice(texts) if texts else f"{value}?")
            elif isinstance(value, bool):
                other = _with(other, path, draw.random() < 0.5)
            else:
                other = _with(other, path, value + draw.choice((-3, -2, -1, 1, 2, 3)))
        if other != answer:
            found.append(other)
    return found


def _values(value: Any, path: Place) -> Iterator[tuple[Place, Any]]:
    yield path, value
    if isinstance(value, dict):
        for key, inner in cast(dict[str, Any], value).items():
            yield from _values(inner, (*path, key))
    elif isinstance(value, list):
        for key, inner in enumerate(cast(list[Any], value)):
            yield from _values(inner, (*path, key))


def _with(answer: Any, path: Place, value: Any) -> Any:
    if not path:
        return value
    whole = copy.deepcopy(answer)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return whole
