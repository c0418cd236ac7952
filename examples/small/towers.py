"""Small search tasks: a corpus about buildings and their builders, and questions about it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.examples.small.prices import name, names

FILE = "towers.jsonl"


def draw_towers(draw: random.Random, count: int) -> dict[str, str]:
    """Return random buildings and their builders."""
    return {tower: name(draw) for tower in names(draw, count)}


def document(tower: str, builder: str) -> dict[str, str]:
    return {"id": tower, "title": tower, "text": f"{builder} built {tower}."}


def line(tower: str, builder: str) -> dict[str, Any]:
    """Return the task's fields for its JSONL line."""
    where = {"evidence": [f"{FILE}#{tower}"]}
    return {
        "id": tower,
        "prompt": f"Who built {tower}?",
        "answer": builder,
        "match": "exact",
        "environment": where,
    }


def write(folder: Path, count: int, seed: int) -> None:
    """Write the folder `corpus`, and a `tasks.jsonl` with one question per document, into a new
    folder."""
    towers = draw_towers(random.Random(f"towers {seed}"), count)
    (folder / "corpus").mkdir(parents=True)
    _write(folder / "corpus" / FILE, towers, document)
    _write(folder / "tasks.jsonl", towers, line)


def _write(path: Path, towers: Mapping[str, str], made: Any) -> None:
    lines = [json.dumps(made(tower, builder)) for tower, builder in towers.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
