"""Sparse attention with kernels is as close to float32 as PyTorch in bfloat16.

The kernels run on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1).
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from keel.model.attention import Segments
from keel.model.sparse.attention import (
    ChunkAttention,
    SparsePass,
    _attend_in_chunks,
    _attend_with_kernels,
    _has_kernels,
    _rows_of,
)
from tests.gpu.marks import DEVICE, INTERPRETED, KERNELS

pytestmark = KERNELS

LENGTHS = (3, 45, 1, 22) if INTERPRETED else (3, 300, 1, 150)
HEADS, RANK, ROPE, TOP_K = (5, 32, 16, 20) if INTERPRETED else (72, 512, 64, 200)
TOKENS = sum(LENGTHS)
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])


def recorded_selection() -> Tensor:
    """Make bitmaps of random selections for every second token with more than `TOP_K` keys."""
    bits = torch.zeros(TOKENS, 8 * (-(-max(LENGTHS) // 8)), dtype=torch.bool)
    for token in range(0, TOKENS, 2):
        position = int(POSITIONS[token])
        if position >= TOP_K:
            bits[token, torch.randperm(position + 1)[:TOP_K]] = True
    shifts = torch.arange(8)
    return (bits.unflatten(1, (-1, 8)) << shifts).sum(-1).byte().to(DEVICE)


def results(attend: Callable[..., tuple[Tensor, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Return the outputs, losses, overlaps and all gradients."""
    torch.manual_seed(0)
    shapes = ((HEADS, RANK + ROPE), (8, 64), (8,), (RANK + ROPE,), (64,))
    leaves = [torch.randn(TOKENS, *shape).to(DTYPE).to(DEVICE, dtype) for shape in shapes]
    leaves[2] = leaves[2].float()
    query, index_q, weight, key, index_k = (x.requires_grad_() for x in leaves)
    rows = _rows_of(Segments.of(LENGTHS, torch.device(DEVICE)))
    recorded = recorded_selection().index_select(0, rows.queries)
    run = ChunkAttention(0.07, RANK, TOP_K, loss=True)
    queries, keys, sparse = (query, index_q, weight), [key, index_k], SparsePass(loss=True)
    mixed, lost, _, overlap = attend(run, queries, keys, rows, recorded, sparse)
    slope = torch.linspace(-3, 3, mixed.numel(), device=DEVICE).sin().view_as(mixed)
    loss = (mixed.float() * slope).sum() + lost.sum()
    found = mixed, lost, overlap, *torch.autograd.grad(loss, leaves)
    return [x.detach().float() for x in found]


def test_attention_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    from keel.model.sparse import kernels  # noqa: PLC0415  (needs Triton)

    if INTERPRETED:  # several tiles in small sizes
        tiles = (kernels._FORWARD, kernels._QUERY_GRADIENT, kernels._KEY_GRADIENT)
        for tile in (*tiles, kernels._SHARES, kernels._INDEX):
            monkeypatch.setitem(tile, "KEYS", 16)
        monkeypatch.setattr(kernels, "_QUERIES", 16)
        monkeypatch.setattr(kernels, "_KEYS", 16)
    exact = results(_attend_in_chunks, torch.float32)
    plain, ours = (results(attend, DTYPE) for attend in (_attend_in_chunks, _attend_with_kernels))
    for right, fused, theirs in zip(exact, ours, plain, strict=True):
        error, bound = ((x - right).norm() for x in (fused, theirs))
        assert error <= 1.2 * bound + 1e-5 * right.norm()


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_sizes_without_kernels() -> None:
    query, index_q = (torch.empty(1, 1, size, device=DEVICE, dtype=DTYPE) for size in (576, 128))
    hopper = torch.cuda.get_device_capability()[0] == 9
    assert _has_kernels(query, index_q, 512) == hopper
    assert not _has_kernels(query, query, 512)
    assert not _has_kernels(query.float(), index_q, 512)
    assert not _has_kernels(query, index_q, 500)
