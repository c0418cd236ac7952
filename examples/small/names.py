"""Generate names that a very small model can spell."""

from __future__ import annotations

import random

_FIRST, _SECOND = "BDFGKLMNPRSTVZ", "aeiou"


def name(draw: random.Random) -> str:
    """Return a name of four letters, such as `Bako`."""
    letters = "".join(draw.choice(_FIRST) + draw.choice(_SECOND) for _ in range(2))
    return letters.capitalize()


def names(draw: random.Random, count: int) -> list[str]:
    """Return distinct names. There are 4,900."""
    result: dict[str, None] = {}
    while len(result) < count:
        result[name(draw)] = None
    return list(result)
