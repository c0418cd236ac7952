"""Maps the columns in a file to the keys of a prompt or a conversation.

`columns` says which column contains a key, as in `{prompt: question, answer: solution}`. A name
with a dot refers to a value inside an object (`answer: reward_model.ground_truth`). An empty name
means that the file does not have the key, even if a column has the same name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from keel.configs.schema import ConfigError, SourceConfig
from keel.data.rows.read import BadLine, Row, kind_of

WRITTEN_BY_KEEL = frozenset(("pass_rate", "provenance"))
"""Columns that Keel writes but never reads."""
_PARSED = frozenset(
    (
        *("messages", "choices", "tests", "subtasks", "criteria", "reward", "environment"),
        *("tolerance", "partial", "refuse", "time_limit_s", "memory_mib"),
    )
)
"""Keys whose values are not text. A table may store these values as JSON."""
_PLACEHOLDER = re.compile(r"\{\{(\w[\w .-]*)\}\}|\{(\w[\w .-]*)\}")
_MISSING: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedRow:
    """A row whose columns have been mapped to keys."""

    known: dict[str, Any]
    as_text: dict[str, Any]
    """Values of the known keys, with numbers written as in the file."""
    further: dict[str, Any]
    """Columns that are not mapped to any key."""
    record: dict[str, Any]
    """The whole row for use in templates, with numbers written as in the file."""
    of_table: bool


class Columns:
    """Maps the columns of a prompt source to keys and records the columns that nothing uses."""

    def __init__(self, source: SourceConfig, known: Collection[str]) -> None:
        """Raise ConfigError if `columns` contains a key that is not in `known`."""
        self._source, self._knob = source, f"data.sources[{source.name}]"
        check_keys(source.columns, known, self._knob)
        self._column = {key: source.columns.get(key, key) for key in sorted(known)}
        self._taken = set(self._column.values())
        names = (m[2] for m in _PLACEHOLDER.finditer(source.template_text) if m[2])
        template = {name.partition(".")[0] for name in names}
        self._used = template | {name.partition(".")[0] for name in self._taken if "." in name}
        self.only_prompt = template <= {"prompt", self._column["prompt"]}
        """True if the template uses no column besides the prompt."""
        self._seen: set[str] = set()
        self.unread: dict[str, str] = {}
        """For each unused column, the location where it first occurred."""

    def keyed(self, row: Row) -> KeyedRow:
        """Map a row's columns to keys. Raises BadLine if the row cannot be read."""
        if isinstance(row.record, BadLine):
            raise row.record
        known = picked(row.record, self._column)
        if row.written is not None:
            as_text, record = picked(row.written, self._column), row.written
        else:
            known = {key: _parse_cell(key, v) for key, v in known.items() if v != ""}
            as_text, record = _numbers_as_text(known), _numbers_as_text(row.record)
        self._seen |= known.keys()
        return KeyedRow(
            known=known,
            as_text=as_text,
            further={key: row.record[key] for key in row.record if key not in self._taken},
            record=record,
            of_table=row.written is None,
        )

    def further(self, row: KeyedRow, used: Collection[str]) -> dict[str, Any]:
        """Return the columns without a key, or whose keys are not in `used` and mean nothing."""
        columns = {self._column[key]: value for key, value in row.known.items() if key not in used}
        return row.further | {name: v for name, v in columns.items() if name in row.record}

    def note_unread(self, row: KeyedRow, at: str) -> None:
        """Record the columns of a row that nothing uses."""
        for name in row.further:
            if name not in self._used and name not in WRITTEN_BY_KEEL:
                self.unread.setdefault(name, at)

    def check_seen(self) -> None:
        """Raise ConfigError if a column named in `columns` never occurred in the data."""
        for key, name in self._source.columns.items():
            if name and key not in self._seen:
                raise ConfigError(
                    f"{self._knob}.columns.{key} = {name!r}: no row of {self._source.path} has "
                    "this column"
                )

    def missing(self, key: str, row: KeyedRow) -> BadLine:
        return BadLine(
            f"has no {self.label(key)}, or it is empty; the row has {', '.join(row.record)}. Name "
            f"the column in {self._knob}.columns"
        )

    def label(self, key: str) -> str:
        name = self._column[key]
        return f"`{key}`" if name == key else f"`{key}` ({self._knob}.columns.{key} = {name!r})"

    def fill_template(self, row: KeyedRow, prompt: str | None) -> str:
        """Fill in the source's template from a row. If `prompt` is given, it replaces `{prompt}`.
        Raises BadLine with the name of a missing column."""

        def replacement(match: re.Match[str]) -> str:
            if match[1]:
                return f"{{{match[1]}}}"
            name = match[2]
            value = _look_up(row.record, name)
            if name == "prompt" and prompt is not None:
                value = prompt
            elif value is _MISSING:
                value = row.as_text.get(name)
            if value is _MISSING or value is None:
                if name == "prompt":
                    raise self.missing("prompt", row)
                raise BadLine(
                    f"has no column {name!r} for {self._knob}.template; it has "
                    f"{', '.join(row.record)} (write {{{{{name}}}}} for literal braces)"
                )
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        return _PLACEHOLDER.sub(replacement, self._source.template_text)


def check_keys(columns: Mapping[str, str], known: Collection[str], knob: str) -> None:
    """Raise ConfigError if `columns` contains an unknown key."""
    for key in columns:
        if key not in known:
            raise ConfigError(f"{knob}.columns.{key}: unknown key; use {', '.join(sorted(known))}")


def picked(record: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the keys in `columns`. A null value counts as missing."""
    values = {key: _look_up(record, name) for key, name in columns.items() if name}
    return {k: v for k, v in values.items() if v is not None and v is not _MISSING}


def _look_up(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column or a dotted path into an object, or `_MISSING`."""
    if name in record or "." not in name:
        return record.get(name, _MISSING)
    value: Any = record
    for step in name.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return _MISSING
        value = cast(Mapping[str, Any], value)[step]
    return value


def _parse_cell(key: str, value: Any) -> Any:
    """Decode a table cell. Cells for keys other than text hold JSON."""
    if key in _PARSED and isinstance(value, str):
        value = parse_json(key, value.lower() if value in ("True", "False") else value)
    return without_nulls(value)


def parse_json(key: str, text: str) -> Any:
    """Parse a table cell as JSON. Raises BadLine if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"`{key}` must be JSON, is {kind_of(text)}: {error}") from error


def without_nulls(value: Any) -> Any:
    """Remove nulls from objects, because tables add the keys of other rows with null values."""
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
