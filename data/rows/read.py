"""Reads the rows in data files and records their places for messages.

`.jsonl` and `.ndjson` files have one object per line, and `.json` files may also contain a list.
`.csv` and `.tsv` files have a header. All of these may be compressed (`.gz`). `.parquet` and
`.arrow` files are read with pyarrow.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import gzip
import importlib
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from keel.configs.schema import ConfigError
from keel.rl.strict_json import allow_long_integers

allow_long_integers()

_LINES, _LISTS, _SHEETS = (".jsonl", ".ndjson"), (".json",), {".csv": ",", ".tsv": "\t"}
_TABLES = (".parquet", ".arrow")
KINDS = (*_LINES, *_LISTS, *_SHEETS, *_TABLES)
READ_ERRORS = (OSError, EOFError, zlib.error)
"""The errors that a file raises if it cannot be read or decompressed."""
_OTHER_DELIMITERS = ";\t|,"
"""Other delimiters in .csv files. Spreadsheets write `;` where the comma is the decimal mark."""
_UNCLOSED = "unexpected end of data"
"""The message from `csv` for a quote that is still open at the end of a file."""
_MAX_CELL = 1 << 30
"""How many characters a cell may have. Python's default limit is 131,072."""
_TABLE_BATCH = 1024
"""How many rows in a table to convert at a time."""
_SMALL_TASKS = "small-tasks"
"""The folder with the recipes that use the tasks in `keel.examples.small`."""
_SURROGATE = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")


class BadLine(ValueError):
    """Raised if a row cannot be used."""


class Row(NamedTuple):
    """One row in a data file."""

    at: str
    """Where the row is, as `file:line`, or `file, row 3` for a table."""
    number: int
    """The line number. In a list, a table or several files it is the row number."""
    record: dict[str, Any] | BadLine
    """The row's columns, or the error that says why it cannot be read."""
    written: dict[str, Any] | None
    """The record with numbers as they were written.

    It is None for a table, where every row has all columns and an empty cell means that there is no
    value.
    """


def kind_of_file(path: Path) -> str:
    """Return a file's extension without `.gz`, or "" if it is unknown."""
    name = path.name.lower().removesuffix(".gz")
    return next((kind for kind in KINDS if name.endswith(kind)), "")


def kind_of(value: object) -> str:
    """Name the type of a JSON value, for messages."""
    if value is None:
        return "missing or null"
    if isinstance(value, str):
        return "text" if value.strip() else "blank"
    kinds: dict[type, str] = {bool: "true or false", list: "a list", dict: "an object"}
    return kinds.get(type(value), "a number")


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading, and decompress it if it ends in `.gz`."""
    return cast(BinaryIO, gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb")


def check_file(path: Path, knob: str) -> None:
    """Check that a file exists.

    Raises ConfigError with the most similar name if it does not.
    """
    if path.is_file():
        return
    problem = "is a folder" if path.is_dir() else "no such file"
    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {path.parent / close[0]}?" if close and close[0] != path.name else ""
    if _SMALL_TASKS in path.parts and not path.parent.exists():
        hint = f"; run `python -m keel.examples.small {_SMALL_TASKS}` to make it"
    raise ConfigError(f"{knob} = {str(path)!r}: {problem} in {path.parent.resolve()}{hint}")


def lines_of(path: Path, knob: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers.

    Raises ConfigError with the setting `knob` if the file cannot be read.
    """
    check_file(path, knob)
    try:
        with open_file(path) as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield number, line
    except READ_ERRORS as error:
        raise ConfigError(f"{knob} = {str(path)!r}: {error}") from error


def object_of(
    line: bytes, *, replace_surrogates: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse a line as an object, and once more with numbers as they were written.

    The second form is needed because `match: exact` distinguishes 0.10 from 0.1. With
    `replace_surrogates`, lone surrogates become replacement characters, as in tokenizers
    (`keel.rollout.chat.encoding`); a policy may sample them. Raises BadLine.
    """
    try:
        text = line.decode(errors="surrogatepass") if replace_surrogates else line.decode()
        if replace_surrogates and _SURROGATE.search(text):
            text = json.dumps(json.loads(text), ensure_ascii=False)
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        record = json.loads(text)
        written = json.loads(text, parse_int=str, parse_float=str)
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8 (byte {error.start}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        # The decoder counts the end of a line as the beginning of the next one.
        column = min(error.pos, len(text.rstrip())) + 1
        raise BadLine(f"not JSON: {error.msg} (column {column})") from error
    except ValueError as error:  # an integer with too many digits
        raise BadLine(f"not JSON: {error}") from error
    except RecursionError as error:
        raise BadLine("nested too deeply") from error
    if not isinstance(record, dict):
        raise BadLine(f"must be an object, is {kind_of(record)}")
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # legal JSON, but no tokenizer accepts it
        raise BadLine("holds half of a surrogate pair (\\ud800 … \\udfff)") from error
    return cast(dict[str, Any], record), written


def rows_of_lines(path: Path, knob: str) -> Iterator[Row]:
    """Yield the rows in a JSON-lines file, whatever its name.

    Raises ConfigError if the file cannot be read or is a single list.
    """
    lines = lines_of(path, knob)
    first = list(islice(lines, 2))
    if _is_list([line for _, line in first]):
        rename = "" if kind_of_file(path) in _LISTS else "rename it to .json and "
        raise ConfigError(
            f"{knob} = {str(path)!r} is a JSON list instead of one object per line; {rename}set "
            "source: file"
        )
    for number, line in chain(first, lines):
        yield _row(f"{path}:{number}", number, line)


def rows_of_files(paths: list[Path], knob: str) -> Iterator[Row]:
    """Yield the rows from all files in order. Raises ConfigError with `knob` and the file."""
    number = 0
    for path in paths:
        check_file(path, knob)
        for row in _rows(path, knob):
            number += 1
            yield row if len(paths) == 1 else row._replace(number=number)


def _rows(path: Path, knob: str) -> Iterator[Row]:
    kind = kind_of_file(path)
    if not kind:
        raise ConfigError(
            f"{knob} = {str(path)!r} must end in one of {', '.join(KINDS)}; source: jsonl reads "
            "JSON lines under any name"
        )
    try:
        if kind in _LISTS and _begins_list(path):
            yield from _list_rows(path)
        elif kind in _SHEETS:
            yield from _sheet_rows(path, _SHEETS[kind])
        elif kind in _TABLES:
            for number, record in enumerate(_table_rows(path, knob), start=1):
                yield Row(f"{path}, row {number}", number, record, None)
        else:
            yield from rows_of_lines(path, knob)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{knob} = {str(path)!r} is not UTF-8 (byte 0x{error.object[error.start]:02x}); "
            f"convert it, for example by iconv -f latin1 -t utf-8 {path.name}"
        ) from error
    except READ_ERRORS as error:
        raise ConfigError(f"{knob} = {str(path)!r} cannot be read: {error}") from error


def _row(at: str, number: int, line: bytes) -> Row:
    try:
        return Row(at, number, *object_of(line))
    except BadLine as error:
        return Row(at, number, error, {})


def _is_list(first: list[bytes]) -> bool:
    """Return whether a JSON file is a single list, judging by its first lines.

    The list may be on one line or continue over many. If a complete list is followed by another
    line, the file is treated as malformed lines instead.
    """
    if not first or not first[0].strip().startswith(b"["):
        return False
    try:
        json.loads(first[0])
    except json.JSONDecodeError as error:
        continues = error.pos >= len(error.doc.rstrip())
        return first[0].strip() == b"[" or (continues and len(first) > 1)
    except (ValueError, RecursionError):
        return False
    return len(first) == 1


def _begins_list(path: Path) -> bool:
    with open_file(path) as file:
        return file.read(4096).decode("utf-8-sig", "replace").lstrip().startswith("[")


def _list_rows(path: Path) -> Iterator[Row]:
    """Yield the objects in a list, each with the line on which it begins."""
    with open_file(path) as file:
        text = file.read().decode("utf-8-sig")
    decode = json.JSONDecoder().raw_decode
    number = 0
    place = text.index("[") + 1
    line = 1 + text.count("\n", 0, place)
    while True:
        begin = _skip_blanks(text, place)
        if text[begin : begin + 1] == "]":
            return
        line += text.count("\n", place, begin)
        try:
            _, end = decode(text, begin)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else error
            raise ConfigError(f"{path}:{line}: not JSON: {reason}") from error
        number += 1
        at = f"{path}:{line} (row {number})"  # the list may be all on one line
        yield _row(at, number, text[begin:end].encode("utf-8", "surrogatepass"))
        place = _skip_blanks(text, end)
        line += text.count("\n", begin, place)
        if text[place : place + 1] == ",":
            place += 1
        elif text[place : place + 1] != "]":
            raise ConfigError(f"{path}:{line}: not JSON: expected a comma or the end of the list")


def _skip_blanks(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place


def _sheet_rows(path: Path, delimiter: str) -> Iterator[Row]:
    """Yield the rows in a CSV file, each with the line on which it begins.

    The first row that is not blank is the header. If it does not contain the delimiter, other
    delimiters are tried.
    """
    csv.field_size_limit(_MAX_CELL)
    with open_file(path) as file:
        lines = (line.decode("utf-8-sig", "replace") for line in file)
        title = next((line for line in lines if line.strip()), "")
    if delimiter not in title:
        delimiter = next((other for other in _OTHER_DELIMITERS if other in title), delimiter)
    with open_file(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        rows = _cells(path, csv.reader(text, delimiter=delimiter, strict=True))
        titles = (row for row in rows if isinstance(row[1], BadLine) or "".join(row[1]).strip())
        at, first = next(titles, (1, []))
        if isinstance(first, BadLine):
            raise ConfigError(f"{path}:{at}: {first}")
        header = [name.strip() for name in first]
        if duplicates := sorted({name for name in header if header.count(name) > 1}):
            raise ConfigError(f"{path}:{at}: several columns are named {duplicates[0]!r}")
        for line, row in rows:
            record: dict[str, Any] | BadLine
            if isinstance(row, BadLine):
                record = row
            elif len(row) == len(header):
                record = dict(zip(header, row, strict=True))
            else:
                record = BadLine(f"has {len(row)} cells, but the header has {len(header)}")
            if row:
                yield Row(f"{path}:{line}", line, record, None)


def _cells(path: Path, reader: Any) -> Iterator[tuple[int, list[str] | BadLine]]:
    """Yield the rows from a `csv.reader` with the line on which each begins.

    Raises ConfigError if a quote is never closed, because its cell then swallows the rest of the
    file.
    """
    while True:
        line = reader.line_num + 1
        try:
            yield line, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if str(error) == _UNCLOSED:
                raise ConfigError(
                    f"{path}:{line}: not CSV: a quote opens in this row and never closes"
                ) from error
            where = f" in line {reader.line_num}" if reader.line_num > line else ""
            reason = f'not CSV: {error}{where}; a quote inside a cell is written twice ("")'
            yield line, BadLine(reason)


def _table_rows(path: Path, knob: str) -> Iterator[dict[str, Any]]:
    """Yield the rows in a Parquet or Arrow file as JSON data.

    Times and decimals become text, NaN becomes null, and binary columns such as images are left
    out.
    """
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"{knob} = {str(path)!r} needs pyarrow: pip install 'pyarrow>=20' (the extra `data`)"
        ) from error
    try:
        if path.suffix.lower() == ".parquet":
            with parquet.ParquetFile(path) as file:
                names = _text_columns(arrow, file.schema_arrow)
                for batch in file.iter_batches(batch_size=_TABLE_BATCH, columns=names):
                    yield from map(_plain, batch.to_pylist())
        else:
            with arrow.memory_map(str(path)) as source, _batches(arrow, source) as batches:
                names = _text_columns(arrow, batches.schema)
                for batch in batches:
                    for start in range(0, batch.num_rows, _TABLE_BATCH):
                        part = batch.select(names).slice(start, _TABLE_BATCH)
                        yield from map(_plain, part.to_pylist())
    except (arrow.ArrowException, OSError) as error:
        raise ConfigError(f"{knob} = {str(path)!r} cannot be read: {error}") from error


def _batches(arrow: Any, source: Any) -> Any:
    """Open an Arrow file, or an Arrow stream as `datasets` writes it."""
    if source.read(6) != b"ARROW1":
        source.seek(0)
        return arrow.ipc.open_stream(source)
    source.seek(0)
    file = arrow.ipc.open_file(source)
    batches = [file.get_batch(index) for index in range(file.num_record_batches)]
    return arrow.RecordBatchReader.from_batches(file.schema, batches)


def _text_columns(arrow: Any, schema: Any) -> list[str]:
    """Return the names of the columns that contain no binary data."""

    def binary(kind: Any) -> bool:
        inner = [kind.field(index).type for index in range(kind.num_fields)]
        types = arrow.types
        is_binary = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
        return any(test(kind) for test in is_binary) or any(map(binary, inner))

    return [field.name for field in schema if not binary(field.type)]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast(list[Any], value)]
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, float) and value != value:
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)
