"""A reward that takes a second. In a module of its own, because workers import it."""

import time
from typing import Any


def nap(prompt: Any, trajectory: Any) -> float:
    time.sleep(1.0)
    return 1.0
