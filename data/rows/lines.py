"""Lines of JSON, compressed or not."""

from __future__ import annotations

import codecs
import difflib
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from keel.configs.schema import ConfigError
from keel.rl.strict_json import allow_long_integers

allow_long_integers()
_HALF = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")


BROKEN = (OSError, EOFError, zlib.error)
"""What a file raises that cannot be read, or is not compressed as its name says."""


SMALL_TASKS = "small-tasks"
"""The folder in which the recipes that come along look for the tasks of `keel.examples.small`."""


class BadLine(ValueError):
    """Why a line cannot be used."""


def opened(path: Path) -> BinaryIO:
    """For reading, decompressed if its name ends in `.gz`."""
    return cast(BinaryIO, gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb")


def check_file(path: Path, knob: str) -> None:
    """Raises ConfigError naming `knob`, with the nearest name there is."""
    if path.is_file():
        return
    what = "is a folder" if path.is_dir() else "no such file"
    near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, near, n=1, cutoff=0.5)
    hint = f"; did you mean {path.parent / close[0]}?" if close and close[0] != path.name else ""
    where = f"looked in {path.parent.resolve()}"
    if not path.is_absolute():
        where += "; a relative path begins where keel is started"
    if SMALL_TASKS in path.parts and not path.parent.exists():
        hint = f"; `python -m keel.examples.small {SMALL_TASKS}` makes it"
    raise ConfigError(f"{knob} = {str(path)!r}: {what} ({where}){hint}")


def lines_of(path: Path, knob: str) -> Iterator[tuple[int, bytes]]:
    """The non-blank lines with their numbers, from 1. Raises ConfigError naming `knob`."""
    check_file(path, knob)
    try:
        with opened(path) as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield number, line
    except BROKEN as error:
        raise ConfigError(f"{knob} = {str(path)!r}: {error}") from error


def object_of(line: bytes, *, halves: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """A line's object, and the same with its numbers as they are written: an answer of 0.10 is not
    0.1 to `match: exact`. halves: those of surrogate pairs, which a policy may sample, are read as
    replacement characters, as tokenizers read them (`keel.rollout.chat.encoding`). Raises
    BadLine."""
    try:
        text = line.decode(errors="surrogatepass") if halves else line.decode()
        if halves:
            text = _without_halves(text)
        record = json.loads(text)
        as_text = json.loads(text, parse_int=str, parse_float=str)
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8 (byte {error.start}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        # At a line's end, which the decoder counts as the next one's beginning.
        column = min(error.pos, len(text.rstrip())) + 1
        raise BadLine(f"not JSON: {error.msg} (column {column})") from error
    except ValueError as error:  # integers of more than LONG digits
        raise BadLine(f"not JSON: {error}") from error
    except RecursionError as error:
        raise BadLine("nested too deeply") from error
    if not isinstance(record, dict):
        raise BadLine(f"must be an object, is {kind_of(record)}")
    _check_encodable(record)
    return cast(dict[str, Any], record), as_text


def _without_halves(text: str) -> str:
    """Of JSON: as they are, and as it spells them."""
    if _HALF.search(text) is None:
        return text
    whole = json.dumps(json.loads(text), ensure_ascii=False)
    return whole.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _check_encodable(record: dict[str, Any]) -> None:
    r"""`\ud800` alone is legal JSON and no character: no tokenizer takes it."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadLine("holds half of a surrogate pair (\\ud800 … \\udfff)") from error


def kind_of(value: object) -> str:
    if value is None:
        return "missing or null"
    if isinstance(value, str):
        return "text" if value.strip() else "blank"
    kinds: dict[type, str] = {bool: "true or false", list: "a list", dict: "an object"}
    return kinds.get(type(value), "a number")
