"""Names that a very small model can spell."""

from __future__ import annotations

import random

_FIRST, _SECOND = "BDFGKLMNPRSTVZ", "aeiou"


def name(draw: random.Random) -> str:
    """Of four letters: `Bako`."""
    letters = "".join(draw.choice(_FIRST) + draw.choice(_SECOND) for _ in range(2))
    return letters.capitalize()


def names(draw: random.Random, count: int) -> list[str]:
    """Different ones, out of 4,900."""
    result: dict[str, None] = {}
    while len(result) < count:
        result[name(draw)] = None
    return list(result)
