"""Slices of packed rows."""

import numpy as np
import pytest
import torch

from keel.model.ulysses import Shard
from keel.rl.recordings import NO_ROUTE
from keel.trainer.engine.policy import HeadInputs
from tests.rl.packed import pack
from tests.rl.rollouts import random_groups


@pytest.mark.parametrize(("tokens", "size"), [(12, 4), (13, 4), (9, 4), (1, 4), (7, 1)])
def test_slices_are_equal_and_ordered(tokens: int, size: int) -> None:
    routes = np.arange(tokens * 6, dtype=np.int16).reshape(tokens, 3, 2)
    slices = [Shard(rank, size) for rank in range(size)]
    parts = [part.cut(routes, NO_ROUTE) for part in slices]
    assert len({len(part) for part in parts}) == 1
    whole = np.concatenate(parts)
    assert (whole[:tokens] == routes).all() and (whole[tokens:] == NO_ROUTE).all()
    assert slices[0].filled(tokens) == len(whole) - tokens
    assert [part.bounds(tokens)[0] for part in slices] == [len(parts[0]) * r for r in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_targets_follow_their_hidden_states(size: int) -> None:
    (batch,) = pack(random_groups(3), replicas=1, micro_batch_tokens=40)
    for row in batch.micro_batches:
        whole = HeadInputs.of(row)
        tokens = len(row.token_ids_N)
        parts = []
        for rank in range(size):
            part = Shard(rank, size)
            start, stop = part.bounds(tokens)
            here = HeadInputs.of(row, start, stop)
            inputs = torch.from_numpy(part.cut(row.token_ids_N, -1))
            # Ids are consecutive in a segment, so id t − 1 predicts id t.
            assert torch.equal(inputs[here.hidden_rows], here.targets - 1)
            parts.append(here)
        for name in ("rows", "targets", "kept_ids"):
            assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))
        spans = torch.cat([part.kept_offsets.diff() for part in parts])
        assert torch.equal(spans, whole.kept_offsets.diff())
