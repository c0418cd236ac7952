"""What the cold start's teacher says to a reasoning_gym question.

A *worked* solution shows the steps inside `<think>` and is right. A *hasty* one has an empty think
block and the mistake of someone in a hurry. A task that is not taught here gets the bare right
answer either way: from it the model learns the format only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Metadata = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Taught:
    """How a task is taught, given the metadata of an entry."""

    working: Callable[[Metadata], str]
    hasty: Callable[[Metadata], str]
    """An answer that is wrong, or right by luck."""
    covers: Callable[[Metadata], bool] = lambda metadata: True
    """Whether an entry is of the kind that is taught."""


def chain_covers(metadata: Metadata) -> bool:
    """Whole numbers, + and − only, no parentheses."""
    return re.fullmatch(r"-?\d+( [+-] -?\d+)*", str(metadata["expression"])) is not None


def chain_working(metadata: Metadata) -> str:
    """The expression, one operation shorter on each line: `4 - 1 - 7` is `3 - 7`, then `-4`."""
    terms = str(metadata["expression"]).split(" ")
    lines: list[str] = []
    while len(terms) > 1:
        left, sign, right, *rest = terms
        terms = [str(int(left) + (1 if sign == "+" else -1) * int(right)), *rest]
        lines.append(" ".join(terms))
    return "\n".join(lines) or terms[0]


def chain_hasty(metadata: Metadata) -> str:
    """Forgets the last term."""
    shorter = " ".join(str(metadata["expression"]).split(" ")[:-2])
    return chain_working({"expression": shorter}).split("\n")[-1] if shorter else "0"


def spell_working(metadata: Metadata) -> str:
    """The letters, numbered from the front: `sun` is `1s2u3n`."""
    return "".join(f"{i % 10}{letter}" for i, letter in enumerate(str(metadata["word"]), start=1))


def spell_hasty(metadata: Metadata) -> str:
    """Repeats the word as it stands."""
    return str(metadata["word"])


def gcd_working(metadata: Metadata) -> str:
    """Remainders of Euclid's algorithm, one line for each further number: `24 18 6 0`."""
    result, *others = (int(number) for number in metadata["numbers"])
    lines: list[str] = []
    for number in others:
        chain = [result, number]
        while chain[-1]:
            chain.append(chain[-2] % chain[-1])
        result = chain[-2]
        lines.append(" ".join(map(str, chain)))
    return "\n".join(lines)


def gcd_hasty(metadata: Metadata) -> str:
    """Takes the smallest number."""
    return str(min(metadata["numbers"]))


def spiral_working(metadata: Metadata) -> str:
    """One side of the spiral on each line, the first side of the whole matrix first."""
    rows = [list(map(str, row)) for row in metadata["matrix"]]
    lines: list[str] = []
    while rows:
        lines.append(" ".join(rows[0]))
        # What is left, turned a quarter to the left: its right column becomes the next top row.
        rows = [list(column) for column in zip(*rows[1:], strict=True)][::-1]
    return "\n".join(lines)


def spiral_hasty(metadata: Metadata) -> str:
    """Reads the matrix row by row."""
    return " ".join(str(number) for row in metadata["matrix"] for number in row)


TAUGHT: Mapping[str, Taught] = {
    "basic_arithmetic": Taught(working=chain_working, hasty=chain_hasty, covers=chain_covers),
    "chain_sum": Taught(working=chain_working, hasty=chain_hasty, covers=chain_covers),
    "gcd": Taught(working=gcd_working, hasty=gcd_hasty),
    "spell_backward": Taught(working=spell_working, hasty=spell_hasty),
    "spiral_matrix": Taught(working=spiral_working, hasty=spiral_hasty),
}
"""Taught tasks, by reasoning_gym name."""


def solution(task: str, entry: Mapping[str, Any], *, worked: bool) -> str:
    """The teacher's whole turn on the question of `entry`, end-of-turn mark left out."""
    metadata, steps, answer = entry["metadata"], "", str(entry["answer"])
    taught = TAUGHT.get(task)
    if taught is not None and taught.covers(metadata):
        if worked:
            steps = taught.working(metadata)
        else:
            answer = taught.hasty(metadata)
    return f"<think>\n{steps}\n</think>\n\n{answer}"
