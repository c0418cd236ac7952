"""The dense warm-up (Eq. 3) concentrates attention on the top k."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keel.model.load import facts_of
from keel.model.sparse.attention import SparsePass, indexers
from tests.model.families import VOCAB
from tests.model.sparse.packed_rows import ours, run, theirs

ROWS, LENGTH, TOP_K, STEPS, LR = 4, 48, 12, 150, 2e-2


def test_indexer_parameters_are_known_from_the_config() -> None:
    model = theirs(index_topk=TOP_K)
    own = sum(p.numel() for indexer in indexers(model) for p in indexer.parameters())
    assert 0 < own == facts_of(model.config).indexer_parameters


@pytest.mark.e2e  # two seconds of arithmetic
def test_trained_indexers_miss_little_attention() -> None:
    """On unseen tokens, less than a third of what random indexers miss."""
    model = theirs(index_topk=TOP_K)
    for name, parameter in model.named_parameters():
        if "self_attn" in name and parameter.ndim == 2 and ".indexer." not in name:
            parameter.data.mul_(8)
    model = ours(model).requires_grad_(False)
    own = [p for indexer in indexers(model) for p in indexer.requires_grad_(True).parameters()]
    generator = torch.Generator().manual_seed(5)

    def drawn() -> list[Tensor]:
        return list(torch.randint(3, VOCAB, (ROWS, 1, LENGTH), generator=generator))

    held_out = drawn() + drawn()

    @torch.no_grad()
    def held() -> Tensor:
        sparse = SparsePass(dense=True, loss=True)
        run(model, held_out, sparse)
        total = torch.stack(sparse.held)
        return total[:, 0] / total[:, 1]

    before = held()
    assert (before < 0.5).all()
    optimizer = torch.optim.AdamW(own, lr=LR, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR * (1 - step / STEPS)
        sparse = SparsePass(dense=True, loss=True)
        run(model, drawn(), sparse)
        sparse.loss_sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    missed = 1 - held()
    assert (missed < (1 - before) / 3).all(), (before, missed)
