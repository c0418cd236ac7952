"""Synthetic text in which something has to be found again, far back.

    ..x7-,.,a0--.-. … ?a0,?x7?…

Letters with a digit each lie in filler, each letter once; the last part asks for them in another
order. The digit after an asked letter is all that can be known; filler is noise.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

KEYS = string.ascii_lowercase
FILLER = ".,-~"
ASK = "?"
ASKED_PART = 0.25
"""Share of the text that asks."""


def retrieval_texts(
    count: int, *, length: int, seed: int, letters: int = len(KEYS), digits: int = 10
) -> Iterator[str]:
    """`count` texts of `length` characters each, of the first so many letters and digits. Texts of
    one seed share no random draws with those of another. Raises ValueError for a length in which
    nothing can be asked, and for more letters and digits than there are."""
    if length < 16:
        raise ValueError(f"length = {length}: too short to put something in and ask for it")
    for name, given, most in (("letters", letters, len(KEYS)), ("digits", digits, 10)):
        if not 1 <= given <= most:
            raise ValueError(f"params.{name} = {given}: must be from 1 to {most}")
    for number in range(count):
        yield _text(random.Random(f"{seed} {number}"), length, letters, digits)


def _text(draw: random.Random, length: int, letters: int, digits: int) -> str:
    asking = max(3, int(length * ASKED_PART))
    room = length - asking
    pairs = min(letters, room // 4)
    keys = draw.sample(KEYS[:letters], pairs)
    values = {key: draw.choice(string.digits[:digits]) for key in keys}
    pieces = [key + values[key] for key in keys]
    pieces += draw.choices(FILLER, k=room - 2 * pairs)
    draw.shuffle(pieces)
    asked = [f"{ASK}{key}{values[key]}" for key in draw.choices(keys, k=asking // 3)]
    return ("".join(pieces) + "".join(asked)).ljust(length, ASK)


def answers(text: str) -> list[int]:
    """Where the asked digits stand."""
    return [at + 2 for at, mark in enumerate(text[:-2]) if mark == ASK and text[at + 2] != ASK]


def pieces(text: str) -> Iterator[tuple[str, bool]]:
    """`text` in pieces, and whether each is an asked digit: tokenized one by one, such a digit is a
    token of its own whatever the tokenizer."""
    begin = 0
    for place in answers(text):
        yield text[begin:place], False
        yield text[place], True
        begin = place + 1
    if begin < len(text):
        yield text[begin:], False


def tokens_of_pairs(letters: int, digits: int) -> tuple[str, ...]:
    """Every letter with every digit. A tokenizer that has them as tokens of their own makes the
    texts easier to learn: the token of the digit then says by itself which letter it is of."""
    return tuple(f"{key}{value}" for key in KEYS[:letters] for value in string.digits[:digits])
