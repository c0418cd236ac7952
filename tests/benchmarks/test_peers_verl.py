"""verl's arm of the comparison, as far as it runs without verl."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.peers import verl_attention


def dense(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Softmax attention over a packed row, with a mask: [heads, N, D] in, [N, heads, D] out."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    causal = torch.ones(len(sequence), len(sequence)).tril().bool()
    seen = causal & (sequence[:, None] == sequence[None, :])
    k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def test_packed_sequences_attend_separately() -> None:
    torch.manual_seed(0)
    lengths = [5, 1, 7]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    row = verl_attention.packed(positions)
    assert row.offsets.tolist() == [0, 5, 6, 13] and row.longest == 7
    shapes = [(4, 13, 8), (2, 13, 8), (2, 13, 8)]
    mine = [torch.randn(shape, requires_grad=True) for shape in shapes]
    theirs = [x.detach().clone().requires_grad_() for x in mine]
    made, _ = verl_attention.attention(
        nn.Identity(), *(x[None] for x in mine), None, scaling=8**-0.5, position_ids=positions
    )
    expected = dense(*theirs, lengths)
    torch.testing.assert_close(made[0], expected)
    upstream = torch.randn_like(expected)
    made[0].backward(upstream)
    expected.backward(upstream)
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)
