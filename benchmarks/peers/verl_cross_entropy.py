"""Cross-entropy over a large vocabulary for verl, in the place of flash-attn's kernel.

One pass over the logits forward and one backward, where the gradient takes their place: nothing of
their size is held besides them.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Columns at once."""


@triton.jit
def _losses(logits, labels, losses, lse, stride, columns, BLOCK: tl.constexpr):
    """A program per row, which keeps the largest logit and the sum of each lane as it goes on."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(largest, x)
        # A lane that has seen nothing yet has no finite maximum to subtract.
        known = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(largest - known) + tl.exp(x - known)
        largest = higher
    top = tl.max(largest, 0)
    z = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    chosen = tl.load(start + tl.load(labels + row)).to(tl.float32)
    tl.store(lse + row, z)
    tl.store(losses + row, z - chosen)


@triton.jit
def _gradients(logits, labels, lse, upstream, gradient, stride, columns, BLOCK: tl.constexpr):
    """A program per row and block of columns: softmax minus one-hot, times the gradient above."""
    row, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    place = row.to(tl.int64) * stride + at
    x = tl.load(logits + place, mask=at < columns, other=-float("inf")).to(tl.float32)
    p = tl.exp(x - tl.load(lse + row))
    p = tl.where(at == tl.load(labels + row), p - 1.0, p) * tl.load(upstream + row)
    tl.store(gradient + place, p, mask=at < columns)


class CrossEntropy(torch.autograd.Function):
    """Losses [N] float32 of logits [N, V]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, inplace: bool) -> Tensor:
        logits, labels = logits.contiguous(), labels.contiguous()
        losses, lse = (
            torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2)
        )
        if len(logits):
            _losses[(len(logits),)](
                logits, labels, losses, lse, logits.stride(0), logits.shape[1], BLOCK=BLOCK
            )
        ctx.save_for_backward(logits, labels, lse)
        ctx.inplace = inplace
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, lse = ctx.saved_tensors
        gradient = logits if ctx.inplace else torch.empty_like(logits)
        rows, columns = logits.shape
        if rows:
            _gradients[(rows, triton.cdiv(columns, BLOCK))](
                logits,
                labels,
                lse,
                upstream[0].contiguous(),
                gradient,
                logits.stride(0),
                columns,
                BLOCK=BLOCK,
            )
        return gradient, None, None


def cross_entropy_loss(
    logits: Tensor, labels: Tensor, inplace_backward: bool = False
) -> tuple[Tensor, Tensor]:
    """Losses per row, and flash-attn's second output, which verl does not read."""
    losses = CrossEntropy.apply(logits, labels, inplace_backward)
    return losses, torch.zeros_like(losses)
