"""How far reading has got, for whoever waits for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

EVERY_S = 2.0


class Progress:
    """Called after each file; a line on stderr now and then. What is read at once needs none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said = clock()

    def __call__(self, folder: Path, done: int, total: int) -> None:
        if (now := self._clock()) - self._said < EVERY_S:
            return
        self._said = now
        print(f"{folder}: read {done:,} of {total:,} step files", file=sys.stderr, flush=True)
