"""Small example tasks for recipes and tutorials."""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]], what: str) -> int:
    """Write a new JSONL file and print how many lines it has. Returns the exit status of a command,
    which is 2 if the file exists already or making the rows raises ValueError or OSError."""
    try:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        with path.open("x", encoding="utf-8") as file:
            file.writelines(lines)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(lines):,} {what} in {path}")
    return 0
