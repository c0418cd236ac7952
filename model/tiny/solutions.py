"""The teacher's solutions to reasoning_gym questions in the cold start.

A *worked* solution has its steps inside `<think>` and is correct. A *hasty* one has an empty
thinking block and a typical mistake. If no solutions are taught for a task, both give the correct
answer without steps, which teaches only the format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Metadata = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Taught:
    """Functions that solve one of the taught tasks. Each one takes an entry's metadata."""

    working: Callable[[Metadata], str]
    hasty: Callable[[Metadata], str]
    """Returns an answer that is usually wrong."""
    covers: Callable[[Metadata], bool] = lambda metadata: True
    """Returns whether solutions to this entry can be taught."""


def _chain_covers(metadata: Metadata) -> bool:
    return re.fullmatch(r"-?\d+( [+-] -?\d+)*", str(metadata["expression"])) is not None


def _chain_working(metadata: Metadata) -> str:
    """Return one line per operation: `4 - 1 - 7` gives `3 - 7`, then `-4`."""
    terms = str(metadata["expression"]).split(" ")
    lines: list[str] = []
    while len(terms) > 1:
        left, sign, right, *rest = terms
        terms = [str(int(left) + (1 if sign == "+" else -1) * int(right)), *rest]
        lines.append(" ".join(terms))
    return "\n".join(lines) or terms[0]


def _chain_hasty(metadata: Metadata) -> str:
    shorter = " ".join(str(metadata["expression"]).split(" ")[:-2])
    return _chain_working({"expression": shorter}).split("\n")[-1] if shorter else "0"


def _spell_working(metadata: Metadata) -> str:
    """Return the letters with their numbers: `sun` gives `1s2u3n`."""
    return "".join(f"{i % 10}{letter}" for i, letter in enumerate(str(metadata["word"]), start=1))


def _gcd_working(metadata: Metadata) -> str:
    """Return the remainders of Euclid's algorithm, one line per further number: `24 18 6 0`."""
    result, *others = (int(number) for number in metadata["numbers"])
    lines: list[str] = []
    for number in others:
        chain = [result, number]
        while chain[-1]:
            chain.append(chain[-2] % chain[-1])
        result = chain[-2]
        lines.append(" ".join(map(str, chain)))
    return "\n".join(lines)


def _spiral_working(metadata: Metadata) -> str:
    rows = [list(map(str, row)) for row in metadata["matrix"]]
    lines: list[str] = []
    while rows:
        lines.append(" ".join(rows[0]))
        # Rotate the remaining rows counter-clockwise: the right column becomes the top row.
        rows = [list(column) for column in zip(*rows[1:], strict=True)][::-1]
    return "\n".join(lines)


_CHAIN = _Taught(working=_chain_working, hasty=_chain_hasty, covers=_chain_covers)
TAUGHT: Mapping[str, _Taught] = {
    "basic_arithmetic": _CHAIN,
    "chain_sum": _CHAIN,
    # The hasty answer is the smallest number, the word itself, or the matrix row by row.
    "gcd": _Taught(working=_gcd_working, hasty=lambda m: str(min(m["numbers"]))),
    "spell_backward": _Taught(working=_spell_working, hasty=lambda m: str(m["word"])),
    "spiral_matrix": _Taught(
        working=_spiral_working,
        hasty=lambda m: " ".join(str(number) for row in m["matrix"] for number in row),
    ),
}
"""The tasks whose solutions are taught, keyed by their names in reasoning_gym."""


def solution(task: str, entry: Mapping[str, Any], *, worked: bool) -> str:
    """Return the teacher's turn for `entry`, without the end-of-turn token."""
    metadata, steps, answer = entry["metadata"], "", str(entry["answer"])
    taught = TAUGHT.get(task)
    if taught is not None and taught.covers(metadata):
        if worked:
            steps = taught.working(metadata)
        else:
            answer = taught.hasty(metadata)
    return f"<think>\n{steps}\n</think>\n\n{answer}"
