"""A reward that takes a while. In a module of its own, because workers import it."""

import os
import time
from typing import Any

SECONDS = float(os.environ.get("KEEL_TEST_SECONDS", "1"))


def nap(prompt: Any, trajectory: Any) -> float:
    time.sleep(SECONDS)
    return 1.0
