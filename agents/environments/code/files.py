"""Implements the policy's file tools, as a program that reads one JSON request from standard
input."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

_MAX_LINES = 2000
_MAX_WIDTH = 2000
_MAX_BYTES = 16 << 20


def _run_file_tool(request: Mapping[str, Any]) -> str:
    """Run a file tool. Raises ValueError or OSError with a message for the policy."""
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
    text, message = apply_edit(path, _read(path), old, new)
    _write(path, text)
    return message


def apply_edit(path: str, text: str, old: str, new: str) -> tuple[str, str]:
    """Return the edited text of the file and a message for the policy. Raises ValueError if the
    edit does not apply."""
    count = text.count(old)
    if count != 1:
        raise ValueError(f"`old` is in {path} {count} times; it must be there exactly once")
    line = text[: text.index(old)].count("\n") + 1
    text = text.replace(old, new)
    last = line + new.count("\n") + 3
    return text, f"{path} now reads:\n" + number_lines(text, max(1, line - 3), last)


def number_lines(text: str, first: int, last: int) -> str:
    # Split like `apply_edit` and other tools count lines: not at form feeds or U+2028.
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []
    first = max(1, first)
    last = min(last or len(lines), len(lines), first + _MAX_LINES - 1)
    numbered = [f"{n:6}\t{lines[n - 1][:_MAX_WIDTH]}" for n in range(first, last + 1)]
    remaining = len(lines) - last
    return "\n".join(numbered) + (f"\n[{remaining} more lines]" if remaining > 0 else "")


def _read(path: str) -> str:
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is no file")
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"{path} is longer than {_MAX_BYTES >> 20} MiB")
    return text


def _write(path: str, text: str) -> None:
    data = text.encode()
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


if __name__ == "__main__":
    try:
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # pyright: ignore
        sys.stdout.write(_run_file_tool(json.load(sys.stdin)))
    except (ValueError, OSError) as error:
        sys.exit(str(error))
