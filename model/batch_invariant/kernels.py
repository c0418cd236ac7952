"""Triton kernels that read and write memory only once. Some reproduce the engine's bits, for GEMMs
with few rows and for head norms. The others compute the gradients of norms and gated activations.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false
# (Triton types neither the launch options of a kernel nor arithmetic inside one.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, DEPTH = 32, 128
"""Tile size for `few_rows`. On an H200, it was among the fastest of 46 sizes for shapes that are
slow in cuBLAS."""
_ELEMENTS = 4096
"""Number of elements in a tile of `rms_norm_grad`."""
PROGRAMS = 512
"""Maximum number of programs for `rms_norm_grad`. Each program writes one partial sum of the weight
gradient."""
BLOCK = 1024


@triton.jit
def _few_rows_kernel(
    x, weight, bias, out, rows, columns, depth, stride,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    left = x + tl.where(row < rows, row, 0).to(tl.int64)[:, None] * stride
    right = weight + tl.where(column < columns, column, 0).to(tl.int64)[None, :] * depth
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        k = start + tl.arange(0, DEPTH)
        a = tl.load(left + k[None, :], mask=k[None, :] < depth, other=0)
        b = tl.load(right + k[:, None], mask=k[:, None] < depth, other=0)
        total = tl.dot(a, b, total)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    live = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=live)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x [N, K] · weightᵀ [K, M] + bias [M] → [N, M] in 16-bit precision, for N up to a few
    hundred. For any N, the sums over K use the same order and instructions as vLLM's kernel. The
    tiles are narrow, so that every SM helps to load `weight`."""
    rows, depth = x.shape
    columns = len(weight)
    out = x.new_empty(rows, columns)
    height = min(64, max(16, triton.next_power_of_2(rows)))
    grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(rows, height))
    _few_rows_kernel[grid](
        x, weight, weight if bias is None else bias, out, rows, columns, depth, x.stride(0),
        HAS_BIAS=bias is not None, ROWS=height, COLUMNS=COLUMNS, DEPTH=DEPTH,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@triton.jit
def _norm_heads_kernel(
    x, weight, out, heads, d, eps, stride_token, stride_head,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    live = (head < heads)[:, None] & (column < d)[None, :]
    at = token * stride_token + head[:, None] * stride_head + column[None, :]
    value = tl.load(x + at, mask=live, other=0).to(tl.float32)
    root = tl.sqrt(tl.sum(value * value, 1) / d + eps)
    normed = value * (1.0 / root)[:, None]
    normed *= tl.load(weight + column, mask=column < d, other=0).to(tl.float32)[None, :]
    to = (token * heads + head[:, None]) * d + column[None, :]
    tl.store(out + to, normed.to(out.dtype.element_ty), mask=live)


def norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute weight [D] · x / rms(x) over the last dimension of x [N, H, D], which may be strided.
    This kernel runs one program per token, while vLLM runs one per head on a contiguous copy."""
    tokens, heads, d = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm_heads_kernel[(tokens,)](
        x, weight, out, heads, d, eps, x.stride(0), x.stride(1),
        HEADS=triton.next_power_of_2(heads), BLOCK=triton.next_power_of_2(d),
        enable_fp_fusion=False,  # vLLM also rounds squares before summing
    )  # fmt: skip
    return out


@triton.jit
def _rms_norm_grad_kernel(
    x, weight, grad, grad_x, grad_weight, rows, heads, d, eps, stride_token, stride_head,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < d
    scale = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        live = (row < rows)[:, None] & inside[None, :]
        from_ = (row // heads) * stride_token + (row % heads) * stride_head
        value = tl.load(x + from_[:, None] + column[None, :], mask=live, other=0).to(tl.float32)
        at = row[:, None] * d + column[None, :]
        given = tl.load(grad + at, mask=live, other=0).to(tl.float32)
        inverse = (1.0 / tl.sqrt(tl.sum(value * value, 1) / d + eps))[:, None]
        normed, scaled = value * inverse, given * scale[None, :]
        along = (tl.sum(scaled * normed, 1) / d)[:, None]
        found = inverse * (scaled - normed * along)
        tl.store(grad_x + at, found.to(grad_x.dtype.element_ty), mask=live)
        total += tl.sum(given * normed, 0)
    tl.store(grad_weight + tl.program_id(0) * d + column, total, mask=inside)


def rms_norm_grad(x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients for x [N, H, D], which may be strided, and weight [D]. `grad` [N, H, D]
    is the gradient of the output weight · x / rms(x)."""
    tokens, heads, d = x.shape
    rows, block = tokens * heads, triton.next_power_of_2(d)
    tile = max(1, _ELEMENTS // block)
    programs = min(PROGRAMS, triton.cdiv(rows, tile))
    of_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = torch.empty(programs, d, dtype=torch.float32, device=x.device)
    _rms_norm_grad_kernel[(programs,)](
        x, weight, grad.contiguous(), of_x, parts, rows, heads, d, eps, x.stride(0), x.stride(1),
        ROWS=tile, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return of_x, parts.sum(0).to(weight.dtype)


@triton.jit
def _swiglu_grad_kernel(packed, grad, out, count, width, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    gate_at = at + at // width * width  # rows of `packed` are twice as wide
    gate = tl.load(packed + gate_at, mask=live, other=0).to(tl.float32)
    up = tl.load(packed + gate_at + width, mask=live, other=0).to(tl.float32)
    given = tl.load(grad + at, mask=live, other=0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    of_gate = given * up * share * (1.0 + gate * (1.0 - share))
    kind = out.dtype.element_ty
    tl.store(out + gate_at, of_gate.to(kind), mask=live)
    tl.store(out + gate_at + width, (given * gate * share).to(kind), mask=live)


def swiglu_grad(packed: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient for the packed input [N, 2·I]. `grad` [N, I] is the gradient of
    silu(first half) · second half."""
    out = torch.empty_like(packed)
    count = grad.numel()
    _swiglu_grad_kernel[(triton.cdiv(count, BLOCK),)](
        packed, grad.contiguous(), out, count, grad.shape[-1], BLOCK=BLOCK
    )
    return out
