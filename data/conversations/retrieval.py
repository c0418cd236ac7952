"""Generates text that can only be predicted by looking far back.

    ..x7-,.,a0--.-. … ?a0,?x7?…

Distinct letters, each followed by a digit, are scattered in random filler. The last part asks for
the letters in a different order. Only the digit after such a letter is predictable.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

_KEYS = string.ascii_lowercase
_FILLER = ".,-~"
_ASK = "?"
_ASKING_SHARE = 0.25
"""The share of the text that asks for letters."""


def retrieval_texts(
    count: int, *, length: int, seed: int, letters: int = len(_KEYS), digits: int = 10
) -> Iterator[str]:
    """Generate `count` texts that are `length` characters long.

    They use the first `letters` letters and the first `digits` digits. Raises ValueError if the
    length is too short for them, or if there are not that many letters or digits.
    """
    if length < 16:
        raise ValueError(f"length = {length}: must be at least 16")
    for name, value, most in (("letters", letters, len(_KEYS)), ("digits", digits, 10)):
        if not 1 <= value <= most:
            raise ValueError(f"params.{name} = {value}: must be from 1 to {most}")
    for number in range(count):
        yield _text(random.Random(f"{seed} {number}"), length, letters, digits)


def _text(draw: random.Random, length: int, letters: int, digits: int) -> str:
    asking = max(3, int(length * _ASKING_SHARE))
    room = length - asking
    pairs = min(letters, room // 4)
    keys = draw.sample(_KEYS[:letters], pairs)
    values = {key: draw.choice(string.digits[:digits]) for key in keys}
    pieces = [key + values[key] for key in keys]
    pieces += draw.choices(_FILLER, k=room - 2 * pairs)
    draw.shuffle(pieces)
    request = [f"{_ASK}{key}{values[key]}" for key in draw.choices(keys, k=asking // 3)]
    return ("".join(pieces) + "".join(request)).ljust(length, _ASK)


def answers(text: str) -> list[int]:
    """Return the positions of the digits that a reader can predict."""
    return [at + 2 for at, mark in enumerate(text[:-2]) if mark == _ASK and text[at + 2] != _ASK]


def pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Split `text` so that each predictable digit is a piece of its own, flagged True.

    If the pieces are tokenized separately, such a digit is a token of its own with any tokenizer.
    """
    begin = 0
    for place in answers(text):
        yield text[begin:place], False
        yield text[place], True
        begin = place + 1
    if begin < len(text):
        yield text[begin:], False
