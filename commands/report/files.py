"""Readers for files that may be incomplete, damaged or untrusted. They skip whatever they cannot
read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, cast

UNREADABLE = (
    *(OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, RecursionError),
)
"""Errors raised when a file is damaged, has unexpected contents, or no longer exists."""
UNKNOWN = ("NaN", "Infinity")
"""Python's spellings of the numbers that JSON cannot represent."""


def loads(text: str | bytes) -> Any:
    """Parse JSON as Python writes it, with None in place of the numbers in `UNKNOWN`. Raises one of
    `UNREADABLE`."""
    return json.loads(text, parse_constant=lambda _: None)


def number(value: object) -> float | None:
    """Return `value` as a finite float, or None if it is not a finite number."""
    try:
        result = float(value) if isinstance(value, int | float) else None
    except OverflowError:  # of hundreds of digits
        return None
    return result if result is not None and isfinite(result) else None


def json_lines(path: Path, notes: list[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the objects in a JSON lines file, leaving out an incomplete last line. Unreadable lines
    are skipped and listed in `notes`."""
    for at, text in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else (), 1):
        try:
            value = loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            yield cast(dict[str, Any], value)
        elif text.strip():
            notes.append(f"{path}:{at}: not a JSON object; skipped")


def brief(error: BaseException) -> str:
    """Describe an error in one line: its first line, the missing key, or its type if it has no
    text."""
    if isinstance(error, KeyError):
        return f"missing {error}"
    return next(iter(str(error).splitlines()), "") or type(error).__name__
