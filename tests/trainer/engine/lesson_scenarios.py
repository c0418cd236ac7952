"""Supervised steps of an engine, run by `window_scenarios.py` in its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from keel.configs.schema import AlgorithmConfig, Config
from keel.rl.metrics import values
from keel.rl.sft import SftExample, pack_sft, supervised_segment
from tests.trainer.engine.batches import VOCABULARY
from tests.trainer.engine.scenarios import TIGHT, Ranks, Result, Scenario, make_config

STEPS = 2
HELDOUT = 99
"""Seed."""
WARM_UP: Mapping[str, str] = {"model": "sparse", "attention": "warm-up"}
"""Only indexers learn."""


def lessons(seed: int) -> list[SftExample]:
    """Five conversations of one to three contexts, most with several trained spans."""
    random = np.random.default_rng(seed)

    def segment(name: str) -> object:
        length = int(random.integers(4, 14))
        output = random.random(length) < 0.6
        output[0], output[-1] = False, True
        return supervised_segment(name, random.integers(0, VOCABULARY, length), output)

    return [
        SftExample(
            prompt_id=f"c{number}",
            segments=tuple(segment(f"c{number}") for _ in range(random.integers(1, 4))),  # pyright: ignore
        )
        for number in range(5)
    ]


def supervised(config: Config) -> Config:
    """Disable clipping, which hides large gradients; a large eps preserves small ones."""
    trainer = replace(config.trainer, grad_clip=0.0, warmup_steps=0, eps=1e-2)
    return replace(config, algorithm=AlgorithmConfig(mask_delta=None), trainer=trainer)


def learning(stage: int, *, model: str = "untied", **changes: object) -> Scenario:
    """Held-out loss before and after two steps, metrics, and weights."""

    def run(ranks: Ranks) -> Result:
        config = supervised(make_config(ranks.world_size, stage, **changes))  # pyright: ignore
        engine, trainer = ranks.engine(config, model), config.trainer
        local = ranks.rank // trainer.sequence_parallel

        def packed(seed: int):
            return pack_sft(
                lessons(seed), ranks=trainer.groups, micro_batch_tokens=trainer.micro_batch_tokens
            )[local]

        def measured() -> dict[str, float]:
            return values(ranks.merged(engine.score(packed(HELDOUT))))

        before = measured()
        metrics = [values(ranks.merged(engine.step([packed(step)]))) for step in range(STEPS)]
        return {
            "heldout": [before, measured()],
            "metrics": metrics,
            "after": ranks.published(engine),
        }

    return run


SCENARIOS: Mapping[int, Mapping[str, Scenario]] = {
    1: {
        "warm-up": learning(0, **WARM_UP),
        "lessons": learning(0),
        "lessons unpacked": learning(0, tokens=1),
        "lessons recomputed": learning(0, activation_checkpointing=True),
    },
    2: {
        "warm-up stage 3": learning(3, tokens=TIGHT, **WARM_UP),
        **{f"lessons stage {stage}": learning(stage, tokens=TIGHT) for stage in (1, 2)},
        "lessons stage 3 sequence": learning(3, sequence_parallel=2, tokens=TIGHT),
    },
}
