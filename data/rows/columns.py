"""From the columns of a file to the keys that a prompt is made of.

`data.sources[].columns` says which column is which key: `{prompt: question, answer: solution}`. A
dot looks into an object (`answer: reward_model.ground_truth`), and an empty name says that a key is
not in the file, whatever a column of it is called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

from keel.configs.schema import ConfigError, SourceConfig
from keel.data.rows.lines import BadLine, kind_of
from keel.data.rows.proposal import ANSWERS, PROMPTS
from keel.data.rows.read import Row

WRITTEN = frozenset(("pass_rate", "provenance"))
"""What Keel itself writes beside the keys that are read."""
PARSED = frozenset(
    (
        *("messages", "choices", "tests", "subtasks", "criteria", "reward", "environment"),
        *("tolerance", "partial", "refuse", "time_limit_s", "memory_mib"),
    )
)
"""Keys that are no text: in a table they may be written as JSON."""
NEAR = 0.85
"""Likeness, of 1, from which on a column's name is taken for a key misspelt."""
_PLACE = re.compile(r"\{\{(\w[\w .-]*)\}\}|\{(\w[\w .-]*)\}")
MISSING: Any = object()
"""What a row has where it has no such column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A row by keys."""

    known: dict[str, Any]
    as_text: dict[str, Any]
    """The same with numbers as they are written."""
    further: dict[str, Any]
    """Columns that are no key's."""
    record: dict[str, Any]
    """The row as it is, for templates, with numbers as they are written."""
    of_table: bool


class Columns:
    """Of one source."""

    def __init__(self, source: SourceConfig, known: Collection[str]) -> None:
        """known: keys with a meaning. Raises ConfigError for others in `columns`."""
        self._source, self._knob = source, f"data.sources[{source.name}]"
        self._of = {key: source.columns.get(key, key) for key in sorted(known)}
        for key in source.columns:
            if key not in known:
                near = get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"keys are {', '.join(self._of)}"
                raise ConfigError(f"{self._knob}.columns.{key}: there is no such key; {hint}")
        self._taken = set(self._of.values())
        self._read = _places(source.template_text)
        """Columns that the template, or a key inside an object, is read from."""
        self._read |= {name.partition(".")[0] for name in source.columns.values() if "." in name}
        self.only_prompt = _places(source.template_text) <= {"prompt", self._of["prompt"]}
        """Whether the source's template has nothing else of a row."""
        self._unseen = {key: name for key, name in source.columns.items() if name}
        self._met: set[str] = set()
        """Keys that a row had so far."""
        self._rows = 0
        self._near: dict[str, str] = {}
        self.unread: dict[str, str] = {}
        """Column that nothing reads → where it was first met."""
        self._names: tuple[str, ...] = ()
        """Of the last row."""

    def given(self, row: Row) -> Given:
        """Raises BadLine."""
        if isinstance(row.record, BadLine):
            raise row.record
        known = self._picked(row.record)
        of_table = row.written is None
        self._names = tuple(row.record)
        if row.written is not None:
            as_text, record = self._picked(row.written), row.written
        else:
            known = {key: _parsed(key, v) for key, v in known.items() if v != ""}
            as_text, record = _written(known), _written(row.record)
        further = {key: row.record[key] for key in row.record if key not in self._taken}
        self._met |= known.keys()
        self._rows += 1
        for key in [key for key in self._unseen if key in known]:
            del self._unseen[key]
        return Given(
            known=known, as_text=as_text, further=further, record=record, of_table=of_table
        )

    def unused(self, given: Given, used: Collection[str]) -> dict[str, Any]:
        """Columns of keys that mean nothing in this row: not one of `used`."""
        left = {self._of[key]: value for key, value in given.known.items() if key not in used}
        return {name: value for name, value in left.items() if name in given.record}

    def check_read(self, given: Given, at: str, *, functions: bool) -> None:
        """Note columns that nothing reads. functions: the source's own see all of them. Raises
        BadLine for a key misspelt."""
        for name in given.further:
            near = self._near_key(name)
            if near and near not in given.known and name not in self._read:
                raise BadLine(
                    f"`{name}` is no key; did you mean `{near}`? Rename it, or say that it is a "
                    f"column of its own by {self._knob}.columns: {{{near}: ''}}"
                )
            if not functions and name not in self._read and name not in WRITTEN:
                self.unread.setdefault(name, at)

    def check_found(self) -> None:
        """Raises ConfigError for a column that `columns` names and no row had."""
        for key, name in self._unseen.items():
            raise ConfigError(
                f"{self._knob}.columns.{key} = {name!r}: no row of {self._source.path} has such a "
                "column"
            )

    def missing(self, key: str) -> BadLine:
        """Why a key is missing from the last row. Raises ConfigError where the recipe is to blame:
        `columns` names a column that no row so far has, or nothing says which of the first row's
        it is."""
        name, has = self._of[key], ", ".join(self._names)
        if name in self._names:
            return BadLine(f"no {self.called(key)}: it is null, or empty")
        taken = {given for other, given in self._of.items() if other != key}
        free = [each for each in self._names if each not in taken]
        near = [key] if key in free else get_close_matches(name, free, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        if self._source.on_bad_line == "error" and key in self._unseen:
            raise ConfigError(
                f"{self._knob}.columns.{key} = {name!r}: {self._source.path} has no such column, "
                f"it has {has}{hint}"
            )
        if self._source.on_bad_line == "error" and self._rows == 1 and has:
            likely = {"prompt": PROMPTS, "answer": ANSWERS}
            wanted = {
                each: next((name for name in names if name in self._names), "COLUMN")
                for each, names in likely.items()
                if each not in self._met and self._of[each] == each
            }
            columns = ", ".join(f"{each}: {name}" for each, name in wanted.items())
            raise ConfigError(
                f"{self._source.path}: its first row has no `{key}`, it has {has}. Say which "
                f"column that is: {self._knob}.columns: {{{columns}}}"
            )
        meant = f"; is `{near[0]}` meant for it?" if near else ""
        return BadLine(f"no {self.called(key)}{meant}")

    def called(self, key: str) -> str:
        """A key, for messages, with the column that it is looked for in."""
        name = self._of[key]
        return f"`{key}`" if name == key else f"`{key}` ({self._knob}.columns: {name!r})"

    def filled(self, given: Given, prompt: str | None) -> str:
        """The source's template over the row's columns; `{prompt}`, where the file has no such
        column, is `prompt`. Raises BadLine naming a column that is missing."""

        def put(match: re.Match[str]) -> str:
            if match[1]:
                return f"{{{match[1]}}}"
            name = match[2]
            value = looked_up(given.record, name)
            if name == "prompt" and prompt is not None:
                value = prompt
            elif value is MISSING:
                value = given.as_text.get(name, MISSING)
            if value is MISSING or value is None:
                if name == "prompt":
                    raise self.missing("prompt")
                has, near = ", ".join(given.record), get_close_matches(name, given.record, n=1)
                hint = f"; did you mean {{{near[0]}}}?" if near else ""
                raise BadLine(
                    f"has no column {name!r}, which {self._knob}.template asks for; it has {has}"
                    f"{hint} (for the text {{{name}}} write {{{{{name}}}}})"
                )
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        return _PLACE.sub(put, self._source.template_text)

    def _picked(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Without nulls, which programs write where a row lacks what others have."""
        found = {key: looked_up(record, name) for key, name in self._of.items() if name}
        return {k: v for k, v in found.items() if v is not None and v is not MISSING}

    def _near_key(self, name: str) -> str:
        if name not in self._near:
            keys = [key for key, column in self._of.items() if column]
            found = get_close_matches(name, keys, n=1, cutoff=NEAR)
            found = found or [key for key in keys if sorted(key) == sorted(name)]  # letters swapped
            self._near[name] = found[0] if found else ""
        return self._near[name]


def _places(template: str) -> set[str]:
    return {match[2].partition(".")[0] for match in _PLACE.finditer(template) if match[2]}


def looked_up(record: Mapping[str, Any], name: str) -> Any:
    """A column, by its own name or into an object by dots; `MISSING` where there is none."""
    if name in record or "." not in name:
        return record.get(name, MISSING)
    value: Any = record
    for step in name.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return MISSING
        value = cast(Mapping[str, Any], value)[step]
    return value


def _parsed(key: str, value: Any) -> Any:
    """A cell of a table: JSON where the key is no text, and without the nulls that a table fills
    objects up with. Raises BadLine."""
    if key in PARSED and isinstance(value, str):
        value = parsed_json(key, value.lower() if value in ("True", "False") else value)
    return without_nulls(value)


def parsed_json(key: str, text: str) -> Any:
    """Of a cell. Raises BadLine."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"`{key}` must be JSON, is {kind_of(text)}: {error}") from error


def without_nulls(value: Any) -> Any:
    """With which a table fills up what others of its rows have."""
    if isinstance(value, dict):
        pairs = cast(dict[str, Any], value).items()
        return {key: without_nulls(each) for key, each in pairs if each is not None}
    return [without_nulls(v) for v in cast(list[Any], value)] if isinstance(value, list) else value


def _written(value: Any) -> Any:
    """Numbers as text, as JSON would write them."""
    if isinstance(value, dict):
        return {key: _written(each) for key, each in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_written(each) for each in cast(list[Any], value)]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return json.dumps(value) if number else value
