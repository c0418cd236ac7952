"""Scenarios for `test_windows.py`: trajectories of up to nine windows, whole or split."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._dynamo.utils import counters

from keel.rl.buffer import split_updates
from keel.rl.packing import TrainBatch
from tests.trainer.engine import lesson_scenarios
from tests.trainer.engine.batches import Rollouts
from tests.trainer.engine.scenarios import (
    Ranks,
    Result,
    Scenario,
    make_config,
    run_rank,
)

STEPS = 3
WINDOWS = 9
PROMPT, HALF = 24, 96
"""Tokens of a shared prompt, and of a micro-batch: three trajectories that share it, or two."""
TIGHT = 40
"""Tokens of micro-batches of two or three windows."""
MASK_DELTA = 0.01
"""Drops some of these trajectories."""


def training(
    stage: int,
    *,
    updates: int = 1,
    model: str = "untied",
    kl_coef: float = 0.0,
    windows: int = WINDOWS,
    prompt: int = 0,
    **changes: Any,
) -> Scenario:
    def run(ranks: Ranks) -> Result:
        config = make_config(
            ranks.world_size, stage, mask_delta=MASK_DELTA, kl_coef=kl_coef, **changes
        )
        engine = ranks.engine(config, model)
        counters.clear()
        metrics, scored, split, shared = [], [], [], []
        for step in range(STEPS):
            # Step 1 has too few groups for all ranks, so some get padding.
            rollouts = Rollouts(step, ranks.folder / "untied", windows=windows, prompt=prompt)
            groups = rollouts.groups(1 if step == 1 else 2, 3, kl_coef=kl_coef)
            batches = [ranks.batch(part, config) for part in split_updates(groups, updates)]
            passes: list[Any] = [None] * ranks.world_size
            dist.all_gather_object(passes, [len(batch.scored_first) for batch in batches])
            scored.append(passes)
            shared.append([any_shared(batch) for batch in batches])
            split.append([batch.split_sequences for batch in batches])
            metrics.append(ranks.merged(engine.step(batches)))
        after = ranks.published(engine)
        return {
            "after": after,
            "metrics": metrics,
            "scored": scored,
            "split": split,
            "shared": shared,
            "graphs": counters["stats"]["unique_graphs"],
        }

    return run


def any_shared(batch: TrainBatch) -> bool:
    return any(one.follows is not None for one in batch.micro_batches)


def prompted(stage: int, *, share_prompts: bool = True, **changes: Any) -> Scenario:
    """Trajectories of one window with a long shared prompt."""
    changes |= {"windows": 1, "prompt": PROMPT, "share_prompts": share_prompts}
    return training(stage, tokens=HALF, **changes)


SCENARIOS: Mapping[int, Mapping[str, Scenario]] = {
    1: {
        "whole": training(0),
        "whole, updates": training(0, updates=2),
        "whole, reference": training(0, kl_coef=0.1),
        "whole, dense": training(0, model="dense"),
        "whole, tight": training(0, tokens=TIGHT),
        "whole, prompted": prompted(0, share_prompts=False, kl_coef=0.1),
        "prompted, alone": prompted(0, kl_coef=0.1),
    },
    2: {
        **{f"whole, stage {stage}": training(stage, tokens=TIGHT) for stage in (0, 2)},
        "updates, stage 3": training(3, tokens=TIGHT, updates=2),
        "reference, stage 1": training(1, tokens=TIGHT, kl_coef=0.1),
        "dense, stage 3, sequence": training(3, tokens=TIGHT, model="dense", sequence_parallel=2),
        "prompted, stage 1, sequence": prompted(1, kl_coef=0.1, sequence_parallel=2),
        "prompted, stage 3, recomputed": prompted(3, kl_coef=0.1, activation_checkpointing=True),
        "prompted, stage 1, experts": prompted(1, kl_coef=0.1, expert_parallel=2),
        "whole, stage 1, sequence": training(1, tokens=TIGHT, sequence_parallel=2),
        "whole, stage 2, asleep, recomputed": training(
            2, tokens=TIGHT, sleep=True, activation_checkpointing=True
        ),
        "whole, stage 3, recomputed": training(3, tokens=TIGHT, activation_checkpointing=True),
        "whole, stage 3, experts": training(3, tokens=TIGHT, expert_parallel=2),
    },
    4: {"whole, stage 3, 4 ranks, sequence": training(3, tokens=TIGHT, sequence_parallel=2)},
}


ALL = {
    size: {**local, **lesson_scenarios.SCENARIOS.get(size, {})} for size, local in SCENARIOS.items()
}
"""Including supervised scenarios, in the same processes."""


def run_window_rank(rank: int, world_size: int, port: int, folder: Path) -> None:
    run_rank(rank, world_size, port, folder, ALL)
