"""Batches whose gradient is not finite, on one rank of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from keel.rl.packing import TrainBatch
from keel.rl.types import ScoredGroup
from keel.trainer.nonfinite import describe_findings
from tests.trainer.engine.batches import Rollouts
from tests.trainer.engine.ranks import Ranks, make_config


def with_nan(batch: TrainBatch) -> TrainBatch:
    """Make one old log-probability of the first micro-batch NaN."""
    first, *others = batch.micro_batches
    logp = first.logp_old_N.copy()
    logp[np.flatnonzero(first.trainable_N)[-1]] = np.nan
    return replace(batch, micro_batches=(replace(first, logp_old_N=logp), *others))


def skipping(stage: int, *, bfloat16: bool = False, **trainer: Any) -> Any:
    """Skipped steps change neither weights nor later steps; too many in a row end training."""

    def run(ranks: Ranks) -> dict[str, Any]:
        from keel.trainer.engine import engine as module  # noqa: PLC0415  (loads DeepSpeed)
        from keel.trainer.engine import objectives  # noqa: PLC0415

        on_cpu, loss = module.compute_dtype, objectives.grpo_loss
        if bfloat16:
            module.compute_dtype = lambda *_: torch.bfloat16
        config = make_config(ranks.world_size, stage, tokens=32, warmup_steps=0, **trainer)
        groups = Rollouts(0).groups(2, 3)
        good = ranks.batch(groups, config)
        assert len(good.micro_batches) == 2, "one that is bad on a rank, and one that is not"
        bad = with_nan(good) if ranks.rank == 1 else good

        def infinite(*values: Any, **options: Any) -> Any:
            """Infinite on rank 0, with a finite gradient."""
            share = loss(*values, **options)
            return replace(share, loss=share.loss + torch.inf) if ranks.rank == 0 else share

        straight, skipped = ranks.engine(config), ranks.engine(config)
        for _ in range(2):
            ranks.merged(straight.step([good]))
        before, metrics, results = ranks.published(skipped), [], []

        def step(batches: Sequence[TrainBatch]) -> None:
            metrics.append(ranks.merged(skipped.step(batches)))
            results.append(findings_of(ranks, skipped.findings, groups))

        step([bad])
        objectives.grpo_loss = infinite
        step([good])
        objectives.grpo_loss = loss
        selected = ranks.published(skipped)
        for _ in range(2):
            step([good])
        after, last = ranks.published(skipped), skipped.gave_up
        for _ in range(2):
            step([bad])
        step([bad, good])  # the second one is skipped, too
        result = {
            "before": before,
            "kept": selected,
            "straight": ranks.published(straight),
            "after": after,
            "end": ranks.published(skipped),
            "metrics": metrics,
            "found": results,
            "gave up": (last, skipped.gave_up),
            "version": skipped.version,
        }
        module.compute_dtype = on_cpu
        return result

    return run


def findings_of(ranks: Ranks, findings: Sequence[Any], groups: Sequence[ScoredGroup]) -> list[str]:
    """Findings of all ranks."""
    everyone = [finding for rank in ranks.all(findings) for finding in rank]
    return list(describe_findings(everyone, groups))


def without_signal(stage: int) -> Any:
    """A step of uniform groups after a normal one, and a resume."""

    def run(ranks: Ranks) -> dict[str, Any]:
        config = make_config(ranks.world_size, stage, tokens=32, warmup_steps=0)
        groups = Rollouts(0).groups(2, 3)
        good = ranks.batch(groups, config)
        uniform = [replace(each, advantages_G=each.advantages_G * 0) for each in groups]
        silent = ranks.batch(uniform, config)
        folder = ranks.folder / f"silent-{ranks.world_size}-{stage}"
        folder.mkdir(exist_ok=True)
        torch.distributed.barrier()

        straight, skipped = ranks.engine(config), ranks.engine(config)
        for engine in (straight, skipped):
            engine.step([good])
        before = ranks.published(skipped)
        metrics = ranks.merged(skipped.step([silent]))
        after = ranks.published(skipped)
        skipped.save(folder)
        torch.distributed.barrier()
        resumed = ranks.engine(config)
        resumed.load(folder)
        for engine in (straight, skipped, resumed):
            metrics_of_last = ranks.merged(engine.step([good]))
        return {
            "before": before,
            "after": after,
            "metrics": [metrics, metrics_of_last],
            "straight": ranks.published(straight),
            "skipped": ranks.published(skipped),
            "resumed": ranks.published(resumed),
            "counts": (resumed.steps, resumed.version),
        }

    return run
