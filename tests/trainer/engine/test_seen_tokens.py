"""Numbers of watched tokens are their own, for any packing and split."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from keel.model.ulysses import Slice
from keel.rl.packing import MicroBatch, pack
from keel.rl.types import TokenNumbers
from keel.trainer.engine.policy import seen_tokens
from keel.trainer.worker import merge_tokens
from tests.rl.rollouts import prompted_groups, random_groups


def logp_of(token: int) -> float:
    return -(token % 31) / 8


def overlap_of(token: int) -> float:
    return (token % 5) / 4


def seen_by(batch: MicroBatch, part: Slice) -> dict[int, TokenNumbers]:
    """Numbers seen by a rank whose network derives them from token ids."""
    sampled = batch.token_ids_N[batch.trainable_N]
    logp = torch.tensor([logp_of(int(token)) for token in sampled])
    overlap = torch.tensor([overlap_of(int(token)) for token in part.cut(batch.token_ids_N, 0)])
    inputs: Any = SimpleNamespace(part=part)
    replay: Any = SimpleNamespace(overlap_N=lambda: overlap)
    return seen_tokens(batch, inputs.part, logp, replay)


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("size", [1, 3], ids=["whole rows", "parts of rows"])
def test_watched_segments_have_their_own_numbers(size: int, share_prompts: bool) -> None:
    for seed in range(8):
        groups = prompted_groups(seed) if share_prompts else random_groups(seed)
        random = Random(seed)
        all_segments = [
            segment
            for group in groups
            for trajectory in group.group.trajectories
            for segment in trajectory.segments
        ]
        watched = random.sample(all_segments, 4)
        batches = pack(
            groups,
            ranks=2,
            micro_batch_tokens=random.choice([7, 40, 400]),
            share_prompts=share_prompts,
            watched=watched,
        )
        results = merge_tokens(
            [
                seen_by(micro_batch, Slice(rank, size))
                for batch in batches
                for micro_batch in batch.micro_batches
                for rank in range(size)
            ]
        )
        assert sorted(results) == [0, 1, 2, 3]
        for number, segment in enumerate(watched):
            ids = segment.token_ids_T.tolist()
            logp = [
                logp_of(token) if sampled else np.nan
                for token, sampled in zip(ids, segment.trainable_T, strict=True)
            ]
            overlap = [np.nan, *map(overlap_of, ids[:-1])]
            np.testing.assert_allclose(results[number].logp_T, logp)
            np.testing.assert_allclose(results[number].overlap_T, overlap)
