"""Sparse attention over packed rows equals transformers' on each segment."""

from __future__ import annotations

import pytest
import torch

from keel.model.sparse.attention import ChunkAttention, SparsePass
from keel.model.sparse.indexer import NONE, select
from tests.model.sparse.packed_rows import (
    TOP_K,
    assert_same_gradients,
    gradients,
    ours,
    run,
    segments_of_ids,
    theirs,
    weighted,
)


@pytest.mark.parametrize("top_k", [TOP_K, 64], ids=["sparse", "all selected"])
def test_packed_equals_transformers_per_segment(top_k: int) -> None:
    plain, ids = theirs(index_topk=top_k), segments_of_ids()
    packed = ours(plain)
    alone = torch.cat([plain.get_decoder()(x, use_cache=False).last_hidden_state[0] for x in ids])
    weighted(alone).backward()
    together = run(packed, ids, SparsePass(chunk=5))
    weighted(together).backward()
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(packed), gradients(plain))  # none for the indexer
    dense = run(packed, ids, SparsePass(dense=True))
    assert torch.allclose(dense, together, atol=1e-4) == (top_k == 64)


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_chunks_recomputation_and_packing_are_equivalent(dense: bool) -> None:
    ids = segments_of_ids()
    results = []
    for way in ("whole", "chunks", "recomputed", "apart"):
        model = ours(theirs()).train()
        if way == "recomputed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        rows = [[part] for part in ids] if way == "apart" else [ids]
        passes = [
            SparsePass(dense=dense, loss=True, chunk=4 if way == "chunks" else None) for _ in rows
        ]
        hidden = torch.cat([run(model, row, one) for row, one in zip(rows, passes, strict=True)])
        loss = torch.stack([one.loss_sum() for one in passes]).sum()
        (weighted(hidden) + loss).backward()
        assert all(len(one.losses) == 2 for one in passes)
        held = torch.stack([torch.stack(one.held).sum(0) for one in passes]).sum(0)
        results.append((hidden.detach(), loss.detach(), held, gradients(model)))
    hidden, loss, held, expected = results[0]
    assert loss > 0.1
    for other in results[1:]:
        torch.testing.assert_close(other[:3], (hidden, loss, held), rtol=1e-5, atol=1e-5)
        assert_same_gradients(other[3], expected)


def test_ties_go_to_later_tokens() -> None:
    scores = torch.tensor([[[0.0, 3.0, -1.0, 0.0], [0.0, -0.0, 0.0, -2.0]]])
    chosen = select(2, scores, 2)  # queries 2 and 3 of a segment
    assert [sorted(row) for row in chosen[0].tolist()] == [[0, 1], [1, 2]]
    assert sorted(select(39, torch.zeros(1, 1, 40), 5)[0, 0].tolist()) == [35, 36, 37, 38, 39]
    assert sorted(select(0, scores[:, :1], 3)[0, 0].tolist()) == [NONE, NONE, 0]


def test_logits_are_exact_for_bfloat16_inputs() -> None:
    """bfloat16 logits near 20 would not distinguish keys 1/16 apart."""
    query = torch.tensor([[[[4.0, 1 / 32]]]]).bfloat16()  # [B, c, H, r]
    key = torch.tensor([[[5.0, 0.0], [5.0, 2.0]]]).bfloat16()
    index = (
        torch.zeros(1, 1, 1, 2).bfloat16(),
        torch.zeros(1, 1, 1),
        torch.zeros(1, 2, 2).bfloat16(),
    )
    chosen = torch.tensor([[[0, 1]]])
    chunk = ChunkAttention(scaling=1.0, rank=2, top_k=2, loss=False)
    share = torch.tensor([0.0, 1 / 16]).softmax(0)[1]
    for mixed, *_ in (
        chunk.dense(1, query, index[0], index[1], key, index[2]),
        chunk.chosen(1, query, index[0], index[1], chosen, key, index[2]),
    ):
        torch.testing.assert_close(mixed[0, 0, 0, 1].float(), 2 * share, rtol=2**-8, atol=0)
        assert mixed[0, 0, 0, 1] != 1.0
