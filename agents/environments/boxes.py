"""A task that takes more steps than fit in a small context window: finding a prize in one of many
boxes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any


class Boxes:
    """A search for a prize in one of `boxes` boxes. The policy looks into one box at a time and
    answers with the number of the box that contains the prize."""

    def __init__(self, boxes: int = 12) -> None:
        self._boxes = boxes

    def opening(self, task: Mapping[str, Any], seed: int) -> str:
        self._prize = random.Random(f"boxes {seed}").randint(1, self._boxes)
        return f"A prize is in one of {self._boxes} boxes. Which?"

    def look(self, box: int) -> str:
        """Look into a box."""
        return f"Box {box} has the prize." if box == self._prize else f"Box {box} is empty."

    def verdict(self, messages: Sequence[Mapping[str, Any]]) -> float:
        return float(messages[-1].get("content") == str(self._prize))
