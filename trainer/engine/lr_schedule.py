"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math

from keel.configs.schema import TrainerConfig


def learning_rate(step: int, config: TrainerConfig, *, total_steps: int) -> float:
    """Learning rate of step 1 … `total_steps`, and of any step a longer run adds.

    Linear warm-up reaches `lr` at step `warmup_steps`; `linear` and `cosine` then decay to
    `min_lr`, which the last step has. Past the last step the rate stays at its final value.
    """
    if step < 1:
        raise ValueError(f"learning_rate: step = {step}, steps are counted from 1")
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    done = min(1.0, done)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * left
