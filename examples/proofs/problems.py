"""Write proof problems with notes for marking: `python -m keel.examples.proofs.problems FILE`.

Some statements are false, and the right answer refutes them.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keel.rewards.judge.specs import INSTRUCTIONS

_COUNT = 36


def _statements(draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield statements, each with notes for marking."""
    while True:
        odd, prime, base = (
            2 * draw.randint(1, 30) + 1,
            draw.choice((5, 7, 11, 13)),
            draw.randint(3, 40),
        )
        euler = draw.choice((11, 17, 41))
        yield (
            f"n² + {odd}n is even for every integer n.",
            f"n² + {odd}n = n(n + {odd}), and one of the factors is even.",
        )
        yield (
            f"The sum of {odd} consecutive integers is divisible by {odd}.",
            f"The sum is {odd} times the middle one.",
        )
        yield (
            f"{base}ⁿ − 1 is divisible by {base - 1} for every n ≥ 1.",
            "By induction, or by the geometric sum.",
        )
        yield (
            f"√{prime} is irrational.",
            f"If p/q in lowest terms had the square {prime}, {prime} would divide both p and q.",
        )
        yield (
            f"n^{prime} − n is divisible by {prime} for every integer n.",
            "Fermat's little theorem, whose use must be justified for multiples of the prime.",
        )
        yield (
            f"n² + n + {euler} is prime for every n ≥ 0.",
            f"False: n = {euler - 1} gives {euler}². A proof of the statement has score 0.",
        )


def lines(count: int = _COUNT, seed: int = 0) -> list[dict[str, Any]]:
    """Return distinct problems as rows for `keel train`."""
    found: dict[str, str] = {}
    for statement, notes in _statements(random.Random(seed)):
        found.setdefault(statement, notes)
        if len(found) == count:
            break
    return [
        {
            "messages": [
                {"role": "system", "content": INSTRUCTIONS},
                {"role": "user", "content": f"Prove or refute: {statement}"},
            ],
            "reward": {"kind": "proof", "reference": notes},
        }
        for statement, notes in found.items()
    ]


if __name__ == "__main__":
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines())
    Path(sys.argv[1]).write_text(text, encoding="utf-8")
