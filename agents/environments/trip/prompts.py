"""Creates prompts for trip tasks."""

from __future__ import annotations

from keel.agents.environments.trip.environment import make_task
from keel.agents.environments.trip.tasks import LEVELS
from keel.rl.types import Prompt


def trip_prompts(level: int, count: int, *, seed: int) -> list[Prompt]:
    """Draw `count` solvable tasks at one of the `LEVELS`. Each seed gives different tasks.

    Raises ValueError if the level is unknown.
    """
    if not 0 <= level < len(LEVELS):
        raise ValueError(f"trip: level = {level}, there are 0 to {len(LEVELS) - 1}")
    seeds = range(seed * 1_000_000, seed * 1_000_000 + count)
    return [
        Prompt(
            prompt_id=f"trip-{level}-{number}",
            domain="trip",
            messages=({"role": "user", "content": make_task(number, LEVELS[level])[1].text()},),
            reward={"kind": "environment", "trip": {"level": level, "seed": number}},
        )
        for number in seeds
    ]
