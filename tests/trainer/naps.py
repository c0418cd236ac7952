"""Rewards that take a while or fail. In a module of its own, because workers import it."""

import os
import random
import time
from typing import Any

from keel.model.ray_timeouts import NAME

SECONDS = float(os.environ.get("KEEL_TEST_SECONDS", "1"))


def some_seconds() -> float:
    return random.uniform(0.5, 1.5) * SECONDS


def nap(prompt: Any, trajectory: Any) -> float:
    time.sleep(some_seconds())
    return 1.0


def elsewhere(prompt: Any, trajectory: Any) -> float:
    time.sleep(0.2)
    return float("reward node" in os.environ.get(NAME, ""))


def fails(prompt: Any, trajectory: Any) -> float:
    raise FileNotFoundError("/data/answers.json")
