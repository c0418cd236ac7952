"""What each group of ranks trains on, of a batch of rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from keel.configs.schema import Config
from keel.rl.buffer import split_updates
from keel.rl.packing import TrainBatch, pack
from keel.rl.types import ScoredGroup
from keel.trainer.run.saved import saved


def shares(groups: Sequence[ScoredGroup], config: Config) -> list[list[TrainBatch]]:
    """What each group of ranks trains on: a batch for each optimizer step."""
    algorithm, trainer = config.algorithm, config.trainer
    shares: list[list[TrainBatch]] = [[] for _ in range(trainer.groups)]
    watched = saved(groups, config.run).segments
    for part in split_updates(groups, algorithm.updates_per_batch):
        packed = pack(
            part,
            ranks=trainer.groups,
            micro_batch_tokens=trainer.micro_batch_tokens,
            skip_uniform_groups=algorithm.skip_uniform_groups,
            sequence_mask=algorithm.mask_delta is not None,
            watched=watched,
        )
        for share, batch in zip(shares, packed, strict=True):
            share.append(batch)
    return shares
