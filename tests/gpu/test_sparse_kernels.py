"""The kernels of sparse attention are as close to float32 as plain PyTorch in bfloat16."""

import pytest
import torch
from torch import Tensor

from keel.model.sparse.attention import ChunkAttention, _attend_fused, _has_kernels
from keel.model.sparse.indexer import NONE, index_scores
from tests.gpu.marks import GPU

pytestmark = GPU

HEADS, RANK, ROPE, TOP_K = 72, 512, 64, 48
ROWS, LENGTH = 2, 150


def inputs() -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Make queries, keys and a selection in which each query sees up to `TOP_K` earlier keys."""
    torch.manual_seed(0)
    draw = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(ROWS, LENGTH, HEADS, RANK + ROPE, **draw)
    key = torch.randn(ROWS, LENGTH, RANK + ROPE, **draw)
    index_q = torch.randn(ROWS, LENGTH, 8, 64, **draw)
    weight = torch.randn(ROWS, LENGTH, 8, device="cuda")
    index_k = torch.randn(ROWS, LENGTH, 64, **draw)
    order = torch.rand(ROWS, LENGTH, LENGTH, device="cuda").argsort(-1)[..., :TOP_K].int()
    seen = order <= torch.arange(LENGTH, device="cuda")[:, None]
    chosen = order.where(seen, NONE)
    chosen[..., 0] = torch.arange(LENGTH, device="cuda")  # so that no query sees nothing
    return [query, index_q, weight], [key, index_k], chosen


def results(dtype: torch.dtype, *, fused: bool) -> list[Tensor]:
    """Return the outputs, the loss and all gradients."""
    queries, keys, chosen = inputs()
    leaves = [x.to(dtype) for x in (*queries, *keys)]
    leaves[2] = leaves[2].float()
    query, index_q, weight, key, index_k = (x.requires_grad_() for x in leaves)
    run = ChunkAttention(0.07, RANK, TOP_K, loss=True)
    if fused:
        mixed, lost, _ = _attend_fused(run, (query, index_q, weight), (key, index_k), chosen)
    else:
        mixed, lost, _ = run.chosen(0, query, index_q, weight, chosen, key, index_k)
    slope = torch.linspace(-3, 3, mixed.numel(), device="cuda").sin().view_as(mixed)
    loss = (mixed.float() * slope).sum() + lost.sum()
    found = mixed, lost, *torch.autograd.grad(loss, leaves)
    return [x.detach().float() for x in found]


def test_attention_and_gradients() -> None:
    (query, index_q, _), _, _ = inputs()
    assert _has_kernels(query, index_q, RANK)
    exact = results(torch.float32, fused=False)
    plain, fused = (results(torch.bfloat16, fused=way) for way in (False, True))
    for right, ours, theirs in zip(exact, fused, plain, strict=True):
        error, bound = ((x - right).norm() for x in (ours, theirs))
        assert error <= 1.2 * bound + 1e-6 * right.norm()


@pytest.mark.parametrize("first", [0, 37])
def test_index_scores(first: int) -> None:
    from keel.model.sparse import kernels  # noqa: PLC0415

    (_, query, weight), (_, key), _ = inputs()
    query, weight = query[:, first:], weight[:, first:]
    ours, theirs = kernels.index_scores(first, query, weight, key), index_scores(query, weight, key)
    position = torch.arange(LENGTH, device="cuda")
    seen = position <= position[first:, None]
    torch.testing.assert_close(ours.where(seen, 0), theirs.where(seen, 0), rtol=1e-5, atol=1e-4)
