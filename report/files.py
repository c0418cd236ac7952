"""Files that may be being written, damaged, or a stranger's: what cannot be read is left out."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, cast

UNREADABLE = (
    *(OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, RecursionError),
)
"""What reading ends in where a file is damaged, has something else in it, or is gone."""
UNKNOWN = ("NaN", "Infinity")
"""What Python writes for numbers that JSON does not know."""


def loads(text: str | bytes) -> Any:
    """As Python writes JSON: None for `UNKNOWN`. Ends in `UNREADABLE`."""
    return json.loads(text, parse_constant=lambda _: None)


def number(value: object) -> float | None:
    """None for what is no number, or none that a page can draw."""
    try:
        found = float(value) if isinstance(value, int | float) else None
    except OverflowError:  # of hundreds of digits
        return None
    return found if found is not None and isfinite(found) else None


def json_lines(path: Path, notes: list[str]) -> Iterator[Mapping[str, Any]]:
    """The objects of a file that may be being written: a last line without an end is left for
    later. Lines that cannot be read are left out, and `notes` says so."""
    if path.exists():
        yield from objects(path.read_bytes().split(b"\n")[:-1], path, notes)


def objects(
    lines: Sequence[bytes], path: Path, notes: list[str], first: int = 1
) -> Iterator[Mapping[str, Any]]:
    """Of lines of a file, of which `first` is the number of the first."""
    for at, text in enumerate(lines, start=first):
        try:
            value = loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            yield cast(dict[str, Any], value)
        elif text.strip():
            notes.append(f"{path}:{at}: not an object in JSON, and left out here")


def brief(error: BaseException) -> str:
    """Its first line, or what it is called; of a key that is not there, which."""
    if isinstance(error, KeyError):
        return f"missing {error}"
    return next(iter(str(error).splitlines()), "") or type(error).__name__
