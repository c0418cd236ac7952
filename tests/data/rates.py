"""Scored groups with a given number of passes."""

import numpy as np

from keel.rl.types import Group, Prompt, ScoredGroup
from tests.rl.rollouts import segment, trajectory


def scored(
    prompt: Prompt, passes: int, *, samples: int = 4, dropped: tuple[str, ...] = ()
) -> ScoredGroup:
    """`samples` completions, those `dropped` among them."""
    there = samples - len(dropped)
    rewards = np.array([float(i < passes) for i in range(there)], np.float32)
    return ScoredGroup(
        group=Group(
            prompt=prompt,
            trajectories=tuple(
                trajectory(segment(name=prompt.prompt_id), sibling=i) for i in range(there)
            ),
            dropped=dropped,
        ),
        rewards_G=rewards,
        parts_G=tuple({"correct": float(reward)} for reward in rewards),
        advantages_G=rewards * 0,
    )
