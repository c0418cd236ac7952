"""The rows of a file or of several, with the place of each for messages.

`.jsonl`, `.ndjson`: an object a line. `.json`: a list of objects, or the same as lines. `.csv`,
`.tsv`: with a header. Each of these may be compressed (`.gz`). `.parquet`, `.arrow`: see
`keel.data.rows.tables`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from keel.configs.schema import ConfigError
from keel.data.rows.lines import BROKEN, BadLine, check_file, lines_of, object_of, opened
from keel.data.rows.tables import TABLES, table_rows

LINES, LISTS, SHEETS = (".jsonl", ".ndjson"), (".json",), {".csv": ",", ".tsv": "\t"}
KINDS = (*LINES, *LISTS, *SHEETS, *TABLES)
OTHER_DELIMITERS = ";\t|,"
"""Between the columns of files that are called CSV all the same: spreadsheets write `;` where the
comma is the decimal mark."""
UNCLOSED = "unexpected end of data"
"""How `csv` calls a quote that is open at the end of a file."""
LONGEST_CELL = 1 << 30
"""Characters; Python's own limit is 131,072 for all of the process."""


class Row(NamedTuple):
    """One row."""

    at: str
    """`file:line`, or `file, row 3` where there are no lines."""
    number: int
    """Of the line, or of the row in a list or a table; where there are several files, of the row in
    all of them."""
    record: dict[str, Any] | BadLine
    """Or why it cannot be read."""
    written: dict[str, Any] | None
    """The same with numbers as they are written; None: the row is of a table, in which every row
    has all columns and an empty cell is none."""


def kind_of_file(path: Path) -> str:
    """Its ending, without `.gz`; empty for one that is not known."""
    name = path.name.lower().removesuffix(".gz")
    return next((kind for kind in KINDS if name.endswith(kind)), "")


def rows_of_lines(path: Path, knob: str) -> Iterator[Row]:
    """JSON lines, whatever the file is called. Blank ones are free. Raises ConfigError naming
    `knob`, for one list, too."""
    lines = lines_of(path, knob)
    first = list(islice(lines, 2))
    if _is_list([line for _, line in first]):
        rename = "" if kind_of_file(path) in LISTS else "let its name end in .json, and "
        raise ConfigError(
            f"{knob} = {str(path)!r}: is a list of JSON, and here each line is an object of its "
            f"own; {rename}set source: file"
        )
    for number, line in chain(first, lines):
        yield _row(f"{path}:{number}", number, line)


def rows_of_files(paths: list[Path], knob: str) -> Iterator[Row]:
    """Of all files, one after the other. Raises ConfigError naming `knob`, and the file, for what
    is of no kind that is known or cannot be read to its end."""
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
            f"{knob} = {str(path)!r}: of no known kind; its name has to end in {', '.join(KINDS)} "
            "(source: jsonl takes lines of JSON under any name)"
        )
    try:
        if kind in LISTS and _begins_list(path):
            yield from _listed(path)
        elif kind in SHEETS:
            yield from _sheet(path, SHEETS[kind])
        elif kind in TABLES:
            for number, record in enumerate(table_rows(path, knob), start=1):
                yield Row(f"{path}, row {number}", number, record, None)
        else:
            yield from rows_of_lines(path, knob)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{knob} = {str(path)!r}: is not UTF-8 (byte 0x{error.object[error.start]:02x}); save "
            f"it as UTF-8, such as by iconv -f latin1 -t utf-8 {path.name}"
        ) from error
    except BROKEN as error:
        raise ConfigError(f"{knob} = {str(path)!r}: cannot be read: {error}") from error


def _row(at: str, number: int, line: bytes) -> Row:
    try:
        return Row(at, number, *object_of(line))
    except BadLine as error:
        return Row(at, number, error, {})


def _is_list(first: list[bytes]) -> bool:
    """Of the first lines: whether a list goes on over all of them, or one is all there is. A list
    that another line follows is a wrong line."""
    if not first or not first[0].strip().startswith(b"["):
        return False
    try:
        json.loads(first[0])
    except json.JSONDecodeError as error:
        goes_on = error.pos >= len(error.doc.rstrip())
        return first[0].strip() == b"[" or (goes_on and len(first) > 1)
    except (ValueError, RecursionError):
        return False
    return len(first) == 1


def _begins_list(path: Path) -> bool:
    with opened(path) as file:
        return file.read(4096).decode("utf-8-sig", "replace").lstrip().startswith("[")


def _listed(path: Path) -> Iterator[Row]:
    """The objects of a list, each at the line that it begins in."""
    with opened(path) as file:
        text = file.read().decode("utf-8-sig")
    decode = json.JSONDecoder().raw_decode
    number = 0
    place, line = text.index("[") + 1, 1 + text.count("\n", 0, text.index("[") + 1)
    while True:
        begin = _after_blanks(text, place)
        if text[begin : begin + 1] == "]":
            return
        line += text.count("\n", place, begin)
        try:
            _, end = decode(text, begin)
        except (ValueError, RecursionError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else error
            raise ConfigError(f"{path}:{line}: not JSON: {why}") from error
        number += 1  # a list may be all on one line
        at = f"{path}:{line} (row {number})"
        yield _row(at, number, text[begin:end].encode("utf-8", "surrogatepass"))
        place = _after_blanks(text, end)
        line += text.count("\n", begin, place)
        if text[place : place + 1] == ",":
            place += 1
        elif text[place : place + 1] != "]":
            raise ConfigError(f"{path}:{line}: not JSON: a comma or the list's end is missing here")


def _after_blanks(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place


def _sheet(path: Path, delimiter: str) -> Iterator[Row]:
    """Yield the rows of a CSV file, each at the line that it begins in. The first row that is not
    blank is the header. Blanks around the columns' names are dropped. A header without `delimiter`
    may have another one."""
    csv.field_size_limit(LONGEST_CELL)
    with opened(path) as file:
        lines = (line.decode("utf-8-sig", "replace") for line in file)
        title = next((line for line in lines if line.strip()), "")
    if delimiter not in title:
        delimiter = next((other for other in OTHER_DELIMITERS if other in title), delimiter)
    with opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        rows = _cells(path, csv.reader(text, delimiter=delimiter, strict=True))
        titles = (row for row in rows if isinstance(row[1], BadLine) or "".join(row[1]).strip())
        at, first = next(titles, (1, []))
        if isinstance(first, BadLine):
            raise ConfigError(f"{path}:{at}: {first}")
        header = [name.strip() for name in first]
        if twice := sorted({name for name in header if header.count(name) > 1}):
            raise ConfigError(f"{path}:{at}: several columns are called {twice[0]!r}; rename them")
        for line, row in rows:
            record: dict[str, Any] | BadLine
            if isinstance(row, BadLine):
                record = row
            elif len(row) == len(header):
                record = dict(zip(header, row, strict=True))
            else:
                record = BadLine(f"has {len(row)} cells, and the header {len(header)}")
            if row:
                yield Row(f"{path}:{line}", line, record, None)


def _cells(path: Path, cells: Any) -> Iterator[tuple[int, list[str] | BadLine]]:
    """The rows of a `csv.reader`, each with the line that it begins in, or why it is none. Raises
    ConfigError for a quote that is never closed: the rest of the file is in its cell."""
    while True:
        line = cells.line_num + 1
        try:
            yield line, next(cells)
        except StopIteration:
            return
        except csv.Error as error:
            if str(error) == UNCLOSED:
                raise ConfigError(
                    f"{path}:{line}: not CSV: a quote opens in this row and never closes, so the "
                    "rest of the file is one cell; close it, or repair the file"
                ) from error
            where = f" in line {cells.line_num}" if cells.line_num > line else ""
            why = f'not CSV: {error}{where}; a quote inside a cell is written twice ("")'
            yield line, BadLine(why)
