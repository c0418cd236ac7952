"""The arithmetic of the support head: logits at chosen (token, id) pairs, and their gradients.

Two plans compute the same thing and are picked by `pair_plan` from sizes that the host knows:

- `gather`: one dot product per pair, O(nnz·d). For spans that are short beside the vocabulary.
- `gemm`: the whole [rows, V] block by a GEMM, a few rows at a time, of which only the
  pairs are read. For a small vocabulary, or spans that are most of it.

`pair_logits` and `pair_grads` are the only functions that touch [nnz]-by-d work: a fused kernel
replaces these two and nothing else. Sums are float32 (float64 for float64 inputs) whatever the
dtype of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GATHER_COST = {"cpu": 16, "cuda": 1000}
"""How many logits the gemm plan computes in the time that the gather plan takes for one pair,
forward and backward. CPU: they cost the same at V/|S| of 14 to 19, measured for V of 150, 300 and
32,000, float32 and bfloat16. CUDA: from the H200 figures in the design (gather 88 ns a pair, full
head 0.04 ns a logit), halved towards gather, which holds less memory."""
GATHER_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
"""Elements of the [pairs, d] block that the gather plan works on at once (CPU: fits the cache)."""
GEMM_ELEMENTS = {"cpu": 2**18, "cuda": 2**27}
"""Elements of the [rows, V] block of logits that exists at once (CUDA: 512 MiB of float32) …"""
GEMM_ROWS = 128
"""… but no fewer rows than this, or the GEMM runs at the speed of reading the head."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The (token, id) pairs whose logits are wanted, ordered by token."""

    ids: Tensor
    """[nnz] int64 vocabulary ids."""
    rows: Tensor
    """[nnz] int64, which row of `hidden` each pair belongs to; does not decrease."""
    host_offsets: NDArray[np.int64]
    """[T+1] where each token's pairs begin; on the host, so that chunking never waits."""


def accumulate_dtype(tensor: Tensor) -> torch.dtype:
    """Where sums are kept: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def rows_at_once(vocab: int, device: torch.device) -> int:
    """Rows of full-vocabulary logits that may exist at once."""
    return max(GEMM_ROWS, _of(GEMM_ELEMENTS, device) // vocab)


def pair_plan(pairs: int, rows: int, vocab: int, device: torch.device) -> Literal["gather", "gemm"]:
    """gemm where the pairs are at least 1/GATHER_COST of all rows·vocab logits."""
    return "gemm" if pairs * _of(GATHER_COST, device) >= rows * vocab else "gather"


def pair_logits(hidden: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
    """[nnz] dot products of `hidden[rows]` with `weight[ids]`."""
    out = torch.empty(len(pairs.ids), dtype=accumulate_dtype(hidden), device=hidden.device)
    vocab, dim = weight.shape
    if pair_plan(len(pairs.ids), len(hidden), vocab, hidden.device) == "gather":
        for pair in _gather_chunks(len(pairs.ids), dim, hidden.device):
            product = weight.index_select(0, pairs.ids[pair]).to(out.dtype)
            product.mul_(hidden.index_select(0, pairs.rows[pair]))
            out[pair] = product.sum(-1)
        return out
    weight = gemm_operand(weight)
    for row, pair in _gemm_chunks(pairs.host_offsets, vocab, hidden.device):
        logits = matmul(gemm_operand(hidden[row]), weight.t())
        torch.index_select(logits.view(-1), 0, _flat(pairs, row, pair, vocab), out=out[pair])
    return out


def pair_grads(
    grad: Tensor, hidden: Tensor, weight: Tensor, pairs: Pairs, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `hidden` and `weight` (where `needs` asks) from `grad` [nnz] of the logits."""
    d_hidden = torch.zeros_like(hidden, dtype=grad.dtype) if needs[0] else None
    d_weight = torch.zeros_like(weight, dtype=grad.dtype) if needs[1] else None
    vocab, dim = weight.shape
    if pair_plan(len(pairs.ids), len(hidden), vocab, hidden.device) == "gather":
        for pair in _gather_chunks(len(pairs.ids), dim, hidden.device):
            ids, rows, scale = pairs.ids[pair], pairs.rows[pair], grad[pair, None]
            if d_hidden is not None:
                d_hidden.index_add_(0, rows, weight.index_select(0, ids).to(grad.dtype) * scale)
            if d_weight is not None:
                d_weight.index_add_(0, ids, hidden.index_select(0, rows).to(grad.dtype) * scale)
    else:
        operand = gemm_operand(weight)
        for row, pair in _gemm_chunks(pairs.host_offsets, vocab, hidden.device):
            block = grad.new_zeros(row.stop - row.start, vocab)
            block.view(-1).scatter_(0, _flat(pairs, row, pair, vocab), grad[pair])
            gemm_grads(block, hidden, operand, row, d_hidden, d_weight)
    return (
        None if d_hidden is None else d_hidden.to(hidden.dtype),
        None if d_weight is None else d_weight.to(weight.dtype),
    )


def gemm_grads(
    block: Tensor,
    hidden: Tensor,
    operand: Tensor,
    row: slice,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
) -> None:
    """Add what the gradient `block` [rows, V] of some rows' logits gives, in place."""
    block = block.to(operand.dtype)
    if d_hidden is not None:
        d_hidden[row] = matmul(block, operand)
    if d_weight is not None:
        part = gemm_operand(hidden[row])
        if block.dtype == d_weight.dtype:
            d_weight.addmm_(block.t(), part)
        else:
            d_weight.add_(matmul(block.t(), part))


def gemm_operand(tensor: Tensor) -> Tensor:
    """What goes into `matmul`: a GPU multiplies narrow floats into float32, a CPU cannot."""
    return tensor if tensor.is_cuda else tensor.to(accumulate_dtype(tensor))


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """GEMM with sums *and result* in float32 (a bfloat16 logit of 20 is off by up to 0.06)."""
    if left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def _flat(pairs: Pairs, row: slice, pair: slice, vocab: int) -> Tensor:
    """Where the pairs lie in the flattened [rows, V] block of one chunk."""
    return (pairs.rows[pair] - row.start) * vocab + pairs.ids[pair]


def _gather_chunks(count: int, dim: int, device: torch.device) -> Iterator[slice]:
    step = max(1, _of(GATHER_ELEMENTS, device) // dim)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _gemm_chunks(
    offsets: NDArray[np.int64], vocab: int, device: torch.device
) -> Iterator[tuple[slice, slice]]:
    """Slices of rows, each with the slice of its pairs."""
    rows, step = len(offsets) - 1, rows_at_once(vocab, device)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield slice(start, stop), slice(int(offsets[start]), int(offsets[stop]))


def _of(table: dict[str, int], device: torch.device) -> int:
    return table["cpu" if device.type == "cpu" else "cuda"]
