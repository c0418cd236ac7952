"""Ctrl-C that loses nothing: the first asks to stop after the step, the second stops at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Self

FIRST = "Stopping after this step, with a checkpoint. Press Ctrl-C again to stop at once."


class Interrupt:
    """While open, answers whether SIGINT or SIGTERM has come. Main thread only."""

    def __init__(self, say: Callable[[str], None], first: str = FIRST) -> None:
        """first: what is said to the first of them."""
        self._say, self._first = say, first
        self._asked = False

    def __call__(self) -> bool:
        return self._asked

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        self._say(self._first)
