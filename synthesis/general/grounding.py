"""Results of tools as they are not: a solution that comes to the same over them has its answer from
elsewhere. Its author has seen the database."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from keel.rl.turns import ToolCall

Leaf = Callable[[Any], Any]
"""A string, number or truth value → another of its kind."""
Results = Sequence[tuple[ToolCall, Mapping[str, str]]]
"""Calls, and what each came to: {"text" or "failed": …}."""


class Replay:
    """Answers a solution's calls with what they came to before, changed. A call that says what it
    was told is one about the true thing."""

    def __init__(self, results: Results, change: Leaf, entries: Leaf) -> None:
        """entries: changes all that a tool has returned, before `change` does its leaves."""
        self._change, self._entries = change, entries
        self._known = {_key(call.name, call.arguments): said for call, said in results}
        self._true: dict[str, Any] = {}

    def __call__(self, call: ToolCall) -> Mapping[str, str]:
        arguments = dict(call.arguments)
        said = self._known.get(_key(call.name, arguments))
        said = said or self._known.get(_key(call.name, every(self._meant, arguments)))
        if said is None:
            return {"failed": "there is no such thing"}
        if "text" not in said:
            return said
        try:
            value: Any = json.loads(said["text"])
        except ValueError:  # of a tool that returns text
            return {"text": str(self._told(self._entries(said["text"])))}
        value = every(self._told, self._entries(value))
        return {"text": json.dumps(value, ensure_ascii=False)}

    def _told(self, value: Any) -> Any:
        changed = self._change(value)
        self._true[json.dumps(changed)] = value
        return changed

    def _meant(self, value: Any) -> Any:
        return self._true.get(json.dumps(value), value)


def every(change: Leaf, value: Any) -> Any:
    """With every leaf changed."""
    if isinstance(value, dict):
        return {name: every(change, one) for name, one in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [every(change, one) for one in cast(list[Any], value)]
    return change(value)


def as_it_is(value: Any) -> Any:
    return value


def fewer(value: Any) -> Any:
    """Half of the entries of a list, of the lists in an object, of an object without any, or of the
    lines of a text: other changes leave a count as it is."""
    if isinstance(value, list):
        each = cast(list[Any], value)
        return each[: len(each) // 2]
    if isinstance(value, dict):
        named = cast(dict[str, Any], value)
        if any(isinstance(one, list) for one in named.values()):
            return {k: fewer(one) if isinstance(one, list) else one for k, one in named.items()}
        return dict(list(named.items())[: len(named) // 2])
    if isinstance(value, str):
        lines = value.splitlines(keepends=True)
        return "".join(lines[: len(lines) // 2])
    return value


def _other_name(value: Any) -> Any:
    return f"{value} II" if isinstance(value, str) else value


def _other_digits(value: Any) -> Any:
    """Of times, prices and the like in a text."""
    if isinstance(value, str):
        return re.sub(r"[0-9]", lambda found: str(9 - int(found[0])), value)
    return value


def _next_number(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else value


def _other_order(value: Any) -> Any:
    """Of numbers: the largest becomes the smallest."""
    return 1000 - value if type(value) in (int, float) else value


CHANGES: Mapping[str, Leaf] = {
    "other names": _other_name,
    "other digits in texts": _other_digits,
    "other numbers": _next_number,
    "numbers in another order": _other_order,
}


def _key(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps([name, dict(arguments)], sort_keys=True)
