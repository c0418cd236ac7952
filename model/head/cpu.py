"""The support head in PyTorch, for CPUs and for float64.

Tokens with a sampling mask need logits at the kept ids only. The others need the full head, which
is computed for a few rows at a time and again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from keel.model.torch_internals import to_device

_GATHER_COST = 16
"""Number of logits that the gemm plan computes in the time that the gather plan needs for one pair,
forward and backward. The plans are equally fast for V/|S| between 14 and 19 (measured for V of 150,
300 and 32,000)."""
_GATHER_ELEMENTS = 2**19
"""Number of elements in a [pairs, d] block of the gather plan, which must fit into the cache."""
_GEMM_ELEMENTS = 2**18
"""Number of elements in a [rows, V] block of the gemm plan."""
_GEMM_ROWS = 128
"""Minimum number of rows in a block of the gemm plan. With fewer rows, reading the head limits the
speed."""


class LogitTransform(NamedTuple):
    """How logits are computed: z = softcap · tanh(scale · (W·h + bias) / softcap) / temperature."""

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float = 0.0  # 0: no cap

    def apply_(self, logits: Tensor) -> None:
        if self.softcap:
            logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        else:
            logits.mul_(self.scale / self.temperature)

    def slope(self, logits: Tensor) -> Tensor | float:
        if not self.softcap:
            return self.scale / self.temperature
        tanh = logits * (self.temperature / self.softcap)
        return (1 - tanh.square_()).mul_(self.scale / self.temperature)


def cpu_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept_ids: Tensor,
    offsets: NDArray[np.int64],
    *,
    bias: Tensor | None = None,
    transform: LogitTransform,
) -> tuple[Tensor, Tensor]:
    """Compute log π(target) and the entropy of each token over its sampling mask, both [R] float32.
    See `keel.model.logprobs.support_head`, which checks the arguments."""
    sizes = np.diff(offsets)
    device = hidden.device
    targets = to_device(targets.long(), device)
    ids = to_device(kept_ids.long(), device)
    if sizes.all():  # all tokens are truncated, or R = 0
        pairs = _Pairs.of(ids, offsets, sizes)
        return _MaskedHead.apply(hidden, weight, bias, targets, pairs, transform)
    if not len(ids):
        return _FullHead.apply(hidden, weight, bias, targets, transform)

    # Mixed: compute truncated tokens and the others separately, then restore the order.
    truncated = np.flatnonzero(sizes)
    order = np.concatenate([truncated, np.flatnonzero(sizes == 0)])
    sizes = sizes[truncated]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    pairs = _Pairs.of(ids, offsets, sizes)
    forward = to_device(torch.from_numpy(order), device)
    back = to_device(torch.from_numpy(np.argsort(order)), device)
    split = [len(truncated), len(order) - len(truncated)]
    hidden_kept, hidden_full = hidden.index_select(0, forward).split(split)
    targets_kept, targets_full = targets.index_select(0, forward).split(split)
    kept = _MaskedHead.apply(hidden_kept, weight, bias, targets_kept, pairs, transform)
    full = _FullHead.apply(hidden_full, weight, bias, targets_full, transform)
    logp, entropy = (
        torch.cat(parts).index_select(0, back) for parts in zip(kept, full, strict=True)
    )
    return logp, entropy


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The (row of `hidden`, kept id) pairs of all sampling masks."""

    ids: Tensor
    rows: Tensor
    """[nnz] int64, row of `hidden` for each pair, in ascending order."""
    host_offsets: NDArray[np.int64]
    """[R+1] start of each token's pairs, in host memory."""

    @staticmethod
    def of(ids: Tensor, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> _Pairs:
        rows = torch.arange(len(sizes), device=ids.device).repeat_interleave(
            to_device(torch.from_numpy(sizes), ids.device), output_size=len(ids)
        )
        return _Pairs(ids, rows, offsets)

    def sum(self, values: Tensor) -> Tensor:
        """Sum the values of each token's pairs: [nnz] → [R]."""
        return values.new_zeros(len(self.host_offsets) - 1).index_add_(0, self.rows, values)

    def flat(self, row: slice, pair: slice, vocab: int) -> Tensor:
        return (self.rows[pair] - row.start) * vocab + self.ids[pair]


class _MaskedHead(Function):
    """Computes the head for tokens sampled with truncation. Saves two floats and two integers per
    (row, id) pair for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        pairs: _Pairs,
        transform: LogitTransform,
    ) -> tuple[Tensor, Tensor]:
        logits = _pair_logits(hidden, weight, pairs)
        if bias is not None:
            logits += bias.index_select(0, pairs.ids)
        transform.apply_(logits)

        rows = pairs.rows
        highest = logits.new_full((len(targets),), -torch.inf)
        highest.scatter_reduce_(0, rows, logits, "amax")
        weights = (logits - highest.index_select(0, rows)).exp_()
        total = pairs.sum(weights)
        probability = weights.div_(total.index_select(0, rows))
        normaliser = highest + total.log()
        entropy = normaliser - pairs.sum(probability * logits)
        at_target = pairs.ids == targets.index_select(0, rows)
        chosen = pairs.sum(logits.masked_fill(~at_target, 0))

        # d logp[row] / d raw logit of each pair.
        slope = probability.neg_().add_(at_target)
        slope.mul_(transform.slope(logits))
        ctx.save_for_backward(hidden, weight, slope, pairs.ids, rows)
        ctx.host_offsets = pairs.host_offsets
        ctx.bias_like = None if bias is None else (bias.shape, bias.dtype)
        entropy = entropy.float()
        ctx.mark_non_differentiable(entropy)
        return (chosen - normaliser).float(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, slope, ids, rows = ctx.saved_tensors
        grad = slope * grad_logp.to(slope.dtype).index_select(0, rows)
        pairs = _Pairs(ids, rows, ctx.host_offsets)
        d_hidden, d_weight = _pair_grads(grad, hidden, weight, pairs, ctx.needs_input_grad[:2])
        d_bias = None
        if ctx.needs_input_grad[2]:
            shape, dtype = ctx.bias_like
            d_bias = grad.new_zeros(shape).index_add_(0, ids, grad).to(dtype)
        return d_hidden, d_weight, d_bias, None, None, None


class _FullHead(Function):
    """Computes the head for tokens sampled without truncation. Saves one float per token for the
    backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
    ) -> tuple[Tensor, Tensor]:
        sums = torch.empty(3, len(hidden), dtype=_accumulate_dtype(hidden), device=hidden.device)
        normaliser, chosen, mean = sums
        operand = weight.to(sums.dtype)
        step = _rows_at_once(len(weight))
        for start in range(0, len(hidden), step):
            row = slice(start, start + step)
            logits = _full_logits(hidden[row], operand, bias, transform)
            normaliser[row] = logits.logsumexp(-1)
            chosen[row] = logits.gather(1, targets[row, None])[:, 0]
            probability = (logits - normaliser[row, None]).exp_()
            mean[row] = probability.mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.transform = transform
        entropy = (normaliser - mean).float()
        ctx.mark_non_differentiable(entropy)
        return (chosen - normaliser).float(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad = grad_logp.to(normaliser.dtype)
        d_hidden = torch.zeros_like(hidden, dtype=grad.dtype) if needs[0] else None
        d_weight = torch.zeros_like(weight, dtype=grad.dtype) if needs[1] else None
        d_bias = grad.new_zeros(len(weight)) if needs[2] else None
        operand = weight.to(grad.dtype)
        step = _rows_at_once(len(weight))
        for start in range(0, len(hidden), step):
            row = slice(start, min(start + step, len(hidden)))
            logits = _full_logits(hidden[row], operand, bias, ctx.transform)
            slope = ctx.transform.slope(logits)
            block = logits.sub_(normaliser[row, None]).exp_().mul_(-grad[row, None])
            block.scatter_add_(1, targets[row, None], grad[row, None])
            block.mul_(slope)
            _gemm_grads(block, hidden, operand, row, d_hidden, d_weight)
            if d_bias is not None:
                d_bias += block.sum(0)
        return _cast(d_hidden, hidden), _cast(d_weight, weight), _cast(d_bias, bias), None, None


def _full_logits(
    hidden: Tensor, operand: Tensor, bias: Tensor | None, transform: LogitTransform
) -> Tensor:
    logits = hidden.to(operand.dtype) @ operand.t()
    if bias is not None:
        logits += bias
    transform.apply_(logits)
    return logits


def _cast(grad: Tensor | None, like: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(like.dtype)


# The arithmetic at (token, id) pairs. `_gathers` chooses between two plans with equal results:
#
# - gather: one dot product per pair, O(nnz·d), for spans much shorter than the vocabulary
# - gemm: blocks of [rows, V] logits, for long spans; only the pairs are read
#
# Operands and sums are float32 (float64 for float64 inputs), whatever the dtype of the inputs.


def _accumulate_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _gathers(pairs: _Pairs, hidden: Tensor, vocab: int) -> bool:
    # Without pairs, as on a rank that got only padding, no copy of the head is made.
    return not len(pairs.ids) or len(pairs.ids) * _GATHER_COST < len(hidden) * vocab


def _pair_logits(hidden: Tensor, weight: Tensor, pairs: _Pairs) -> Tensor:
    """Compute the dot product of `hidden[rows]` and `weight[ids]` for each pair, [nnz]."""
    out = torch.empty(len(pairs.ids), dtype=_accumulate_dtype(hidden), device=hidden.device)
    vocab, dim = weight.shape
    if _gathers(pairs, hidden, vocab):
        for pair in _gather_chunks(len(pairs.ids), dim):
            product = weight.index_select(0, pairs.ids[pair]).to(out.dtype)
            product.mul_(hidden.index_select(0, pairs.rows[pair]))
            out[pair] = product.sum(-1)
        return out
    operand = weight.to(out.dtype)
    for row, pair in _gemm_chunks(pairs.host_offsets, vocab):
        logits = hidden[row].to(out.dtype) @ operand.t()
        torch.index_select(logits.view(-1), 0, pairs.flat(row, pair, vocab), out=out[pair])
    return out


def _pair_grads(
    grad: Tensor, hidden: Tensor, weight: Tensor, pairs: _Pairs, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of `hidden` and `weight`, given `grad` [nnz], the gradient of the
    logits."""
    d_hidden = torch.zeros_like(hidden, dtype=grad.dtype) if needs[0] else None
    d_weight = torch.zeros_like(weight, dtype=grad.dtype) if needs[1] else None
    vocab, dim = weight.shape
    if _gathers(pairs, hidden, vocab):
        for pair in _gather_chunks(len(pairs.ids), dim):
            ids, rows, scale = pairs.ids[pair], pairs.rows[pair], grad[pair, None]
            if d_hidden is not None:
                d_hidden.index_add_(0, rows, weight.index_select(0, ids).to(grad.dtype) * scale)
            if d_weight is not None:
                d_weight.index_add_(0, ids, hidden.index_select(0, rows).to(grad.dtype) * scale)
    else:
        operand = weight.to(grad.dtype)
        for row, pair in _gemm_chunks(pairs.host_offsets, vocab):
            block = grad.new_zeros(row.stop - row.start, vocab)
            block.view(-1).scatter_(0, pairs.flat(row, pair, vocab), grad[pair])
            _gemm_grads(block, hidden, operand, row, d_hidden, d_weight)
    return _cast(d_hidden, hidden), _cast(d_weight, weight)


def _gemm_grads(
    block: Tensor,
    hidden: Tensor,
    operand: Tensor,
    row: slice,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
) -> None:
    """Add one block of rows' contribution to the gradients of `hidden` and `weight`. `block` [rows,
    V] is the gradient of the logits for these rows."""
    if d_hidden is not None:
        d_hidden[row] = block @ operand
    if d_weight is not None:
        d_weight.addmm_(block.t(), hidden[row].to(block.dtype))


def _gather_chunks(count: int, dim: int) -> Iterator[slice]:
    step = max(1, _GATHER_ELEMENTS // dim)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _rows_at_once(vocab: int) -> int:
    return max(_GEMM_ROWS, _GEMM_ELEMENTS // vocab)


def _gemm_chunks(offsets: NDArray[np.int64], vocab: int) -> Iterator[tuple[slice, slice]]:
    rows, step = len(offsets) - 1, _rows_at_once(vocab)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield slice(start, stop), slice(int(offsets[start]), int(offsets[stop]))
