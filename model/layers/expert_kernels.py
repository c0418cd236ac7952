"""Triton kernels for the steps before and after the grouped GEMMs in MoE layers. Each kernel reads
and writes memory only once.

There are S = tokens · K rows, sorted by expert, and `position[t·K + j]` is the row for token t's
j-th expert.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# (Triton types neither the launch options of a kernel nor arithmetic inside one.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _spread_kernel(out, tokens, position, d, K: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    for start in range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)
        live = column < d
        value = tl.load(tokens + t * d + column, mask=live, other=0)
        for j in tl.static_range(K):
            row = tl.load(position + t * K + j).to(tl.int64)
            tl.store(out + row * d + column, value, mask=live)


@triton.jit
def _combine_kernel(
    out, rows, weights, position, d, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    for start in range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)
        live = column < d
        total = tl.zeros([BLOCK], tl.float32)
        for j in tl.static_range(K):
            row = tl.load(position + t * K + j).to(tl.int64)
            value = tl.load(rows + row * d + column, mask=live, other=0).to(tl.float32)
            if WEIGHTED:
                value *= tl.load(weights + t * K + j).to(tl.float32)
            total += value
        tl.store(out + t * d + column, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def _combine_gradient_kernel(
    grad_rows, grad_weights, grad, rows, weights, position, d,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    for j in tl.static_range(K):
        row = tl.load(position + t * K + j).to(tl.int64)
        weight = tl.load(weights + t * K + j).to(tl.float32)
        dot = tl.zeros([BLOCK], tl.float32)
        for start in range(0, d, BLOCK):
            column = start + tl.arange(0, BLOCK)
            live = column < d
            g = tl.load(grad + t * d + column, mask=live, other=0).to(tl.float32)
            value = tl.load(rows + row * d + column, mask=live, other=0).to(tl.float32)
            dot += g * value
            tl.store(
                grad_rows + row * d + column, (g * weight).to(grad_rows.dtype.element_ty), mask=live
            )
        tl.store(grad_weights + t * K + j, tl.sum(dot, axis=0).to(grad_weights.dtype.element_ty))


@triton.jit
def _swiglu_kernel(out, packed, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    gate = tl.load(packed + row * 2 * width + column, mask=live, other=0).to(tl.float32)
    up = tl.load(packed + row * 2 * width + width + column, mask=live, other=0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=live)


@triton.jit
def _swiglu_gradient_kernel(grad_packed, grad, packed, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    gate = tl.load(packed + row * 2 * width + column, mask=live, other=0).to(tl.float32)
    up = tl.load(packed + row * 2 * width + width + column, mask=live, other=0).to(tl.float32)
    g = tl.load(grad + row * width + column, mask=live, other=0).to(tl.float32)
    share = tl.sigmoid(gate)
    grad_gate = g * up * share * (1.0 + gate * (1.0 - share))
    grad_up = g * gate * share
    kind = grad_packed.dtype.element_ty
    tl.store(grad_packed + row * 2 * width + column, grad_gate.to(kind), mask=live)
    tl.store(grad_packed + row * 2 * width + width + column, grad_up.to(kind), mask=live)


def spread(tokens: Tensor, position: Tensor, per_token: int) -> Tensor:
    """Copy each token to the rows of its experts, [T, d] → [T·K, d]."""
    count, d = tokens.shape
    out = tokens.new_empty(count * per_token, d)
    _spread_kernel[(count,)](out, tokens, position, d, K=per_token, BLOCK=BLOCK, num_warps=4)
    return out


def combine(rows: Tensor, weights: Tensor | None, position: Tensor, per_token: int) -> Tensor:
    """Sum the rows of each token in float32, [T·K, d] → [T, d]. If `weights` [T, K] is given, the
    sum is weighted."""
    count, d = len(rows) // per_token, rows.shape[1]
    out = rows.new_empty(count, d)
    _combine_kernel[(count,)](
        out, rows, rows if weights is None else weights, position, d,
        K=per_token, WEIGHTED=weights is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def combine_gradients(
    grad: Tensor, rows: Tensor, weights: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `combine` with respect to rows [T·K, d] and weights [T, K]."""
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    _combine_gradient_kernel[(len(grad),)](
        grad_rows, grad_weights, grad, rows, weights, position, rows.shape[1],
        K=weights.shape[1], BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return grad_rows, grad_weights


def swiglu(packed: Tensor) -> Tensor:
    """Compute silu(gate) · up from the packed input [S, 2·I] → [S, I]."""
    count, width = packed.shape[0], packed.shape[1] // 2
    out = packed.new_empty(count, width)
    _swiglu_kernel[(count, triton.cdiv(width, BLOCK))](out, packed, width, BLOCK=BLOCK, num_warps=4)
    return out


def swiglu_gradient(grad: Tensor, packed: Tensor) -> Tensor:
    """Return the gradient of `swiglu`, [S, 2·I]."""
    grad_packed = torch.empty_like(packed)
    count, width = grad.shape
    _swiglu_gradient_kernel[(count, triton.cdiv(width, BLOCK))](
        grad_packed, grad, packed, width, BLOCK=BLOCK, num_warps=4
    )
    return grad_packed
