"""Maps the columns in a file to the keys of a prompt.

`data.sources[].columns` says which column contains a key, as in `{prompt: question, answer:
solution}`. A name with a dot refers to a value inside an object (`answer:
reward_model.ground_truth`). An empty name means that the file does not have the key, even if a
column has the same name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

from keel.configs.schema import ConfigError, SourceConfig
from keel.data.rows.proposal import ANSWERS, PROMPTS
from keel.data.rows.read import BadLine, Row, kind_of

WRITTEN_BY_KEEL = frozenset(("pass_rate", "provenance"))
"""Columns that Keel writes but never reads."""
_PARSED = frozenset(
    (
        *("messages", "choices", "tests", "subtasks", "criteria", "reward", "environment"),
        *("tolerance", "partial", "refuse", "time_limit_s", "memory_mib"),
    )
)
"""Keys that do not hold text, so a table may store them as JSON."""
_SIMILARITY = 0.85
"""How similar a column's name must be to a key to be reported as a misspelling."""
_PLACEHOLDER = re.compile(r"\{\{(\w[\w .-]*)\}\}|\{(\w[\w .-]*)\}")
MISSING: Any = object()
"""The value for a column that a row does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedRow:
    """A row whose columns have been mapped to keys."""

    known: dict[str, Any]
    as_text: dict[str, Any]
    """The known keys again, with numbers written as in the file."""
    further: dict[str, Any]
    """The columns that do not belong to any key."""
    record: dict[str, Any]
    """The whole row for use in templates, with numbers written as in the file."""
    of_table: bool


class Columns:
    """Maps the columns in one source to keys, and keeps track of those that are not used."""

    def __init__(self, source: SourceConfig, known: Collection[str]) -> None:
        """Read the source's settings.

        `known` contains the keys that have a meaning. Raises ConfigError if `columns` uses any
        others.
        """
        self._source, self._knob = source, f"data.sources[{source.name}]"
        self._column = {key: source.columns.get(key, key) for key in sorted(known)}
        for key in source.columns:
            if key not in known:
                near = get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"use {', '.join(self._column)}"
                raise ConfigError(f"{self._knob}.columns.{key}: unknown key; {hint}")
        self._taken = set(self._column.values())
        template = _placeholders(source.template_text)
        nested = {name.partition(".")[0] for name in source.columns.values() if "." in name}
        self._used = template | nested
        self.only_prompt = template <= {"prompt", self._column["prompt"]}
        """Whether the template uses no column other than the prompt."""
        self._never_seen = {key: name for key, name in source.columns.items() if name}
        self._seen: set[str] = set()
        self._rows = 0
        self._near: dict[str, str] = {}
        self.unread: dict[str, str] = {}
        """Maps each unused column to the place where it first occurred."""
        self._names: tuple[str, ...] = ()
        """The columns in the last row."""

    def keyed(self, row: Row) -> KeyedRow:
        """Map a row's columns to keys. Raises BadLine if the row cannot be read."""
        if isinstance(row.record, BadLine):
            raise row.record
        known = self._pick(row.record)
        self._names = tuple(row.record)
        if row.written is not None:
            as_text, record = self._pick(row.written), row.written
        else:
            known = {key: _parse_cell(key, v) for key, v in known.items() if v != ""}
            as_text, record = _numbers_as_text(known), _numbers_as_text(row.record)
        self._seen |= known.keys()
        self._rows += 1
        for key in [key for key in self._never_seen if key in known]:
            del self._never_seen[key]
        return KeyedRow(
            known=known,
            as_text=as_text,
            further={key: row.record[key] for key in row.record if key not in self._taken},
            record=record,
            of_table=row.written is None,
        )

    def unused(self, row: KeyedRow, used: Collection[str]) -> dict[str, Any]:
        """Return the columns whose keys are not in `used`, i.e. have no meaning in this row."""
        columns = {self._column[key]: value for key, value in row.known.items() if key not in used}
        return {name: value for name, value in columns.items() if name in row.record}

    def note_unread(self, row: KeyedRow, at: str, *, functions: bool) -> None:
        """Record the columns in a row that are not used.

        `functions` says whether the source gives weight to functions, which can see all columns.
        Raises BadLine for a misspelt key.
        """
        for name in row.further:
            near = self._near_key(name)
            if near and near not in row.known and name not in self._used:
                raise BadLine(
                    f"unknown key `{name}`; did you mean `{near}`? Rename it, or keep it as a "
                    f"separate column by {self._knob}.columns: {{{near}: ''}}"
                )
            if not functions and name not in self._used and name not in WRITTEN_BY_KEEL:
                self.unread.setdefault(name, at)

    def check_seen(self) -> None:
        """Check that every column named in `columns` has occurred; raise ConfigError otherwise."""
        for key, name in self._never_seen.items():
            raise ConfigError(
                f"{self._knob}.columns.{key} = {name!r}: no row of {self._source.path} has this "
                "column"
            )

    def missing(self, key: str) -> BadLine:
        """Build the error for a key that the last row does not have.

        Raises ConfigError if the recipe is wrong, because no row so far has the column or because
        the first row has it under a different name.
        """
        name, has = self._column[key], ", ".join(self._names)
        if name in self._names:
            return BadLine(f"no {self.label(key)}: it is null, or empty")
        taken = {column for other, column in self._column.items() if other != key}
        free = [each for each in self._names if each not in taken]
        near = [key] if key in free else get_close_matches(name, free, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        if self._source.on_bad_line == "error" and key in self._never_seen:
            raise ConfigError(
                f"{self._knob}.columns.{key} = {name!r}: {self._source.path} has no such column, "
                f"it has {has}{hint}"
            )
        if self._source.on_bad_line == "error" and self._rows == 1 and has:
            likely = {"prompt": PROMPTS, "answer": ANSWERS}
            proposal = {
                each: next((name for name in names if name in self._names), "COLUMN")
                for each, names in likely.items()
                if each not in self._seen and self._column[each] == each
            }
            columns = ", ".join(f"{each}: {name}" for each, name in proposal.items())
            raise ConfigError(
                f"{self._source.path}: its first row has no `{key}`, it has {has}. Name the "
                f"column: {self._knob}.columns: {{{columns}}}"
            )
        return BadLine(f"no {self.label(key)}{hint}")

    def label(self, key: str) -> str:
        """Describe a key and its column for messages."""
        name = self._column[key]
        return f"`{key}`" if name == key else f"`{key}` ({self._knob}.columns: {name!r})"

    def fill_template(self, row: KeyedRow, prompt: str | None) -> str:
        """Fill in the source's template from a row. If `prompt` is given, it replaces `{prompt}`.

        Raises BadLine with the name of a missing column.
        """

        def replacement(match: re.Match[str]) -> str:
            if match[1]:
                return f"{{{match[1]}}}"
            name = match[2]
            value = look_up(row.record, name)
            if name == "prompt" and prompt is not None:
                value = prompt
            elif value is MISSING:
                value = row.as_text.get(name, MISSING)
            if value is MISSING or value is None:
                if name == "prompt":
                    raise self.missing("prompt")
                has, near = ", ".join(row.record), get_close_matches(name, row.record, n=1)
                hint = f"; did you mean {{{near[0]}}}?" if near else ""
                raise BadLine(
                    f"has no column {name!r} for {self._knob}.template; it has {has}{hint} (write "
                    f"{{{{{name}}}}} for literal braces)"
                )
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        return _PLACEHOLDER.sub(replacement, self._source.template_text)

    def _pick(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the known keys in a record.

        Nulls are left out because they mean missing values.
        """
        values = {key: look_up(record, name) for key, name in self._column.items() if name}
        return {k: v for k, v in values.items() if v is not None and v is not MISSING}

    def _near_key(self, name: str) -> str:
        if name not in self._near:
            keys = [key for key, column in self._column.items() if column]
            near = get_close_matches(name, keys, n=1, cutoff=_SIMILARITY)
            near = near or [key for key in keys if sorted(key) == sorted(name)]  # letters swapped
            self._near[name] = near[0] if near else ""
        return self._near[name]


def _placeholders(template: str) -> set[str]:
    return {match[2].partition(".")[0] for match in _PLACEHOLDER.finditer(template) if match[2]}


def look_up(record: Mapping[str, Any], name: str) -> Any:
    """Find a column by its name or by a dotted path into an object. Returns `MISSING` if absent."""
    if name in record or "." not in name:
        return record.get(name, MISSING)
    value: Any = record
    for step in name.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return MISSING
        value = cast(Mapping[str, Any], value)[step]
    return value


def _parse_cell(key: str, value: Any) -> Any:
    """Decode a table cell, which holds JSON for keys other than text. Raises BadLine."""
    if key in _PARSED and isinstance(value, str):
        value = parse_json(key, value.lower() if value in ("True", "False") else value)
    return without_nulls(value)


def parse_json(key: str, text: str) -> Any:
    """Parse a table cell as JSON. Raises BadLine."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"`{key}` must be JSON, is {kind_of(text)}: {error}") from error


def without_nulls(value: Any) -> Any:
    """Remove nulls from objects, since tables add the keys that other rows have."""
    if isinstance(value, dict):
        pairs = cast(dict[str, Any], value).items()
        return {key: without_nulls(each) for key, each in pairs if each is not None}
    return [without_nulls(v) for v in cast(list[Any], value)] if isinstance(value, list) else value


def _numbers_as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers_as_text(each) for key, each in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_numbers_as_text(each) for each in cast(list[Any], value)]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return json.dumps(value) if number else value
