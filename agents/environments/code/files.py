"""The policy's file tools, as a program: `python files.py`, a request as JSON on standard input.

Any Python from 3.9, no package.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping
from typing import Any

MOST_LINES = 2000
MOST_WIDE = 2000
MOST_BYTES = 16 << 20


def request_of(request: Mapping[str, Any]) -> bytes:
    return json.dumps(request).encode()


def done(request: Mapping[str, Any]) -> str:
    """Raises ValueError and OSError with what is to be told."""
    path = request["path"]
    if request["do"] == "view":
        if os.path.isdir(path):
            return "\n".join(sorted(one.name + "/" * one.is_dir() for one in os.scandir(path)))
        return number_lines(_read(path), request["first"], request["last"])
    old, new = request["old"], request["new"]
    if not old:
        if os.path.lexists(path):
            raise ValueError(f"{path} is there already: say in `old` which text to replace")
        _write(path, new)
        return f"{path} was made"
    text = _read(path)
    text, said = apply_edit(path, text, old, new)
    _write(path, text)
    return said


def apply_edit(path: str, text: str, old: str, new: str) -> tuple[str, str]:
    """The file's new text, and what the policy is told. Raises ValueError."""
    count = text.count(old)
    if count != 1:
        raise ValueError(f"`old` is in {path} {count} times; it must be there exactly once")
    line = text[: text.index(old)].count("\n") + 1
    text = text.replace(old, new)
    return text, f"{path} now reads:\n" + number_lines(
        text, max(1, line - 3), line + new.count("\n") + 3
    )


def number_lines(text: str, first: int, last: int) -> str:
    # By what `edited` and every tool that names a line counts them: not at form feeds, U+2028 …
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []
    first = max(1, first)
    last = min(last or len(lines), len(lines), first + MOST_LINES - 1)
    shown = [f"{n:6}\t{lines[n - 1][:MOST_WIDE]}" for n in range(first, last + 1)]
    left = len(lines) - last
    return "\n".join(shown) + (f"\n[{left} more lines]" if left > 0 else "")


def _read(path: str) -> str:
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is no file")
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"{path} is longer than {MOST_BYTES >> 20} MiB")
    return text


def _write(path: str, text: str) -> None:
    """Into a file beside it, which then takes its place: what fails leaves `path` as it was."""
    data = text.encode()
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    path = os.path.realpath(path)  # what a link leads to is written, and the link stays
    try:
        with open(path, "r+b") as file:  # whether it may be written at all
            mode = os.fstat(file.fileno()).st_mode
    except FileNotFoundError:
        mode = None
    beside = os.path.join(os.path.dirname(path), f".{os.getpid()}.keel")
    # One that is there is of an edit that was ended on its way.
    opened = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    try:
        with open(opened, "wb") as file:
            file.write(data)
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
        os.replace(beside, path)
    except OSError:
        os.unlink(beside)
        raise


if __name__ == "__main__":
    try:
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # pyright: ignore
        sys.stdout.write(done(json.load(sys.stdin)))
    except (ValueError, OSError) as error:
        sys.exit(str(error))
