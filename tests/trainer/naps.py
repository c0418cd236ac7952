"""A reward that takes a while. In a module of its own, because workers import it."""

import os
import random
import time
from typing import Any

SECONDS = float(os.environ.get("KEEL_TEST_SECONDS", "1"))


def some_seconds() -> float:
    return random.uniform(0.5, 1.5) * SECONDS


def nap(prompt: Any, trajectory: Any) -> float:
    time.sleep(some_seconds())
    return 1.0
