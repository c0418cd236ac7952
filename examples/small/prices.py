"""Small general tasks: look up prices in a shop, or find the cheaper of two items. The files have
the format that `keel synthesize` writes."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_ITEMS = 80
TOOLS = '''\
"""Prices of a shop."""


def price(item: str) -> int:
    """Its price."""
    if item not in database:
        raise LookupError(f"there is no {item}")
    return database[item]
'''


@dataclass(frozen=True)
class _PriceQuestion:
    """A question about the price of an item, or about which of two items is cheaper."""

    items: tuple[str, ...]

    @property
    def text(self) -> str:
        if len(self.items) == 1:
            return f"Submit the price of {self.items[0]}."
        return f"Submit the cheaper of {self.items[0]} and {self.items[1]}."

    def answer(self, prices: Mapping[str, int]) -> int | str:
        if len(self.items) == 1:
            return prices[self.items[0]]
        return min(self.items, key=lambda item: prices[item])

    def solution(self, number: int) -> str:
        return f"def solve_{number}(tools):\n    return {self._right('tools.price(item={!r})')}\n"

    def verifier(self, number: int) -> str:
        return (
            f"def verify_{number}(answer, database):\n"
            f"    right = {self._right('database[{!r}]')}\n"
            "    return type(answer) is type(right) and answer == right\n"
        )

    def _right(self, price: str) -> str:
        """Return Python code for the right answer. `price` is the code for the price of an item."""
        one, *other = map(price.format, self.items)
        return f"{self.items[0]!r} if {one} < {other[0]} else {self.items[1]!r}" if other else one


def draw_prices(draw: random.Random) -> dict[str, int]:
    """Return distinct random two-digit prices."""
    return dict(zip(names(draw, _ITEMS), draw.sample(range(10, 100), _ITEMS), strict=True))


def draw_question(draw: random.Random, prices: Mapping[str, int]) -> _PriceQuestion:
    return _PriceQuestion(tuple(draw.sample(list(prices), draw.choice((1, 2)))))


def write(folder: Path, count: int, seed: int) -> None:
    """Write an environment with `count` different tasks into a new folder."""
    draw = random.Random(f"prices {seed}")
    prices = draw_prices(draw)
    request: dict[_PriceQuestion, None] = {}
    while len(request) < count:
        request[draw_question(draw, prices)] = None
    tasks = [{"question": question.text, "tools": ["price"]} for question in request]
    files = {
        "database.json": json.dumps(prices),
        "tools.py": TOOLS,
        "task.json": json.dumps({"name": "prices", "category": "prices of a shop", "tasks": tasks}),
        "solve.py": "\n\n".join(question.solution(n) for n, question in enumerate(request)),
        "verify.py": "\n\n".join(question.verifier(n) for n, question in enumerate(request)),
        "provenance.json": json.dumps(
            {"made": f"by python -m keel.examples.small --seed {seed}; no model took part"}
        ),
    }
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


_FIRST, _SECOND = "BDFGKLMNPRSTVZ", "aeiou"


def name(draw: random.Random) -> str:
    """Return a random name of four letters, such as `Bako`."""
    letters = "".join(draw.choice(_FIRST) + draw.choice(_SECOND) for _ in range(2))
    return letters.capitalize()


def names(draw: random.Random, count: int) -> list[str]:
    """Return distinct random names. There are 4,900 possible names."""
    result: dict[str, None] = {}
    while len(result) < count:
        result[name(draw)] = None
    return list(result)
