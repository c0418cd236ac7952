"""Triton kernels that read and write memory only once. They cover the steps around the grouped
GEMMs of MoE layers, gradients of norms and gated activations, and GEMMs and head norms that are
bit-identical to vLLM's batch-invariant kernels.

In the kernels for experts there are S = tokens · K rows, sorted by expert, and `position[t·K + j]`
is the row for token t's j-th expert.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false
# (Triton types neither the launch options of a kernel nor arithmetic inside one.)

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS, _DEPTH = 32, 128
"""Tile size for `few_rows`, among the fastest of 46 sizes on an H200."""
_ELEMENTS = 4096
_PROGRAMS = 512
"""Number of programs in `rms_norm_grad`, each of which writes a partial sum of the
weight gradient."""
_BLOCK = 1024


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


def dispatch(tokens: Tensor, position: Tensor, per_token: int) -> Tensor:
    """Copy each token to the rows of its experts, [T, d] → [T·K, d]."""
    count, d = tokens.shape
    out = tokens.new_empty(count * per_token, d)
    _spread_kernel[(count,)](out, tokens, position, d, K=per_token, BLOCK=_BLOCK, num_warps=4)
    return out


def combine(rows: Tensor, weights: Tensor | None, position: Tensor, per_token: int) -> Tensor:
    """Sum each token's rows in float32, weighted by `weights` [T, K]: [T·K, d] → [T, d]."""
    count, d = len(rows) // per_token, rows.shape[1]
    out = rows.new_empty(count, d)
    _combine_kernel[(count,)](
        out, rows, rows if weights is None else weights, position, d,
        K=per_token, WEIGHTED=weights is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def combine_gradients(
    grad: Tensor, rows: Tensor, weights: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `combine` with respect to the rows [T·K, d] and the weights [T,
    K]."""
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    _combine_gradient_kernel[(len(grad),)](
        grad_rows, grad_weights, grad, rows, weights, position, rows.shape[1],
        K=weights.shape[1], BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return grad_rows, grad_weights


def swiglu(packed: Tensor) -> Tensor:
    """Compute silu(gate) · up for packed gate and up, [S, 2·I] → [S, I]."""
    count, width = packed.shape[0], packed.shape[1] // 2
    out = packed.new_empty(count, width)
    _swiglu_kernel[(count, triton.cdiv(width, _BLOCK))](
        out, packed, width, BLOCK=_BLOCK, num_warps=4
    )
    return out


def swiglu_gradient(grad: Tensor, packed: Tensor) -> Tensor:
    """Compute the gradient with respect to `swiglu`'s packed input, [S, 2·I]."""
    grad_packed = torch.empty_like(packed)
    count, width = grad.shape
    _swiglu_gradient_kernel[(count, triton.cdiv(width, _BLOCK))](
        grad_packed, grad, packed, width, BLOCK=_BLOCK, num_warps=4
    )
    return grad_packed


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
    hundred. For any N, the sums over K use the same order and instructions as vLLM's kernel. Narrow
    tiles let every SM help load `weight`."""
    rows, depth = x.shape
    columns = len(weight)
    out = x.new_empty(rows, columns)
    height = min(64, max(16, triton.next_power_of_2(rows)))
    grid = (triton.cdiv(columns, _COLUMNS), triton.cdiv(rows, height))
    _few_rows_kernel[grid](
        x, weight, weight if bias is None else bias, out, rows, columns, depth, x.stride(0),
        HAS_BIAS=bias is not None, ROWS=height, COLUMNS=_COLUMNS, DEPTH=_DEPTH,
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
    Unlike vLLM, which runs one program per head on a contiguous copy, this kernel runs one program
    per token."""
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
    """Compute the gradients of weight [D] · x / rms(x) with respect to x [N, H, D], which may be
    strided, and `weight`. `grad` [N, H, D] is the gradient of the output."""
    tokens, heads, d = x.shape
    rows, block = tokens * heads, triton.next_power_of_2(d)
    tile = max(1, _ELEMENTS // block)
    programs = min(_PROGRAMS, triton.cdiv(rows, tile))
    of_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = torch.empty(programs, d, dtype=torch.float32, device=x.device)
    _rms_norm_grad_kernel[(programs,)](
        x, weight, grad.contiguous(), of_x, parts, rows, heads, d, eps, x.stride(0), x.stride(1),
        ROWS=tile, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return of_x, parts.sum(0).to(weight.dtype)
