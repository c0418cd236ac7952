"""Triton kernels of the support head. They compute logits and gradients for the kept ids or for the
whole vocabulary.

Let E be the number of kept ids over all tokens (the *entries*; each needs one row of the head). The
kernels for kept ids read one row of the head or of the hidden states per entry, accumulate in
float32 registers and write each output once. There are no atomics, so results are bit-identical for
the same input.

    logits           one program per few entries   hidden[t] · weight[v]          reads E rows
    span_statistics  one program per token         log π, entropy, logsumexp
    coefficients     one program per many entries  dL/d(hidden[t] · weight[v])
    hidden_gradient  one program per token         Σ over its ids                 reads E rows
    weight_gradient  one program per vocabulary row Σ over the tokens that kept it reads E rows

`weight_gradient` needs the entries sorted by id (`EntriesById`). A frequent id is kept by a large
fraction of all tokens, so each run of `_LONG_ROW` sorted entries with the same id is summed
separately.

The full head, for tokens without truncation, processes the vocabulary in blocks: a GEMM computes
one block of logits in float32, and a kernel folds it into running statistics (forward) or turns it
into gradients (backward). One GEMM over all tokens completes each block of the weight gradient.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false
# (Triton types neither the launch options of a kernel nor arithmetic inside one.)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from keel.model.head.cpu import LogitTransform

_LONG_ROW = 256
"""Number of sorted entries with the same id that are summed as one part."""


class _Tiling(NamedTuple):
    """The number of entries, columns and warps per Triton program, tuned on an H200."""

    entries: int
    columns: int
    warps: int


_LOGITS = _Tiling(2, 512, 1)
_HIDDEN_GRADIENT = _Tiling(4, 512, 1)
_WEIGHT_GRADIENT = _Tiling(4, 1024, 2)


class EntriesById(NamedTuple):
    """Sampling-mask entries sorted by vocabulary id, so that all tokens that kept a given id are
    adjacent."""

    entry: Tensor
    """[E] int64, original position of each sorted entry."""
    token: Tensor
    """[E] int32, token of each sorted entry."""
    ids: Tensor
    """[E] int32, ids in ascending order."""
    row_start: Tensor
    """[V+1] int32. Vocabulary row v has the sorted entries row_start[v] … row_start[v+1]−1."""

    @staticmethod
    def build(ids: Tensor, token: Tensor, vocabulary: int) -> EntriesById:
        """Sort the sampling-mask entries by vocabulary id, without synchronizing with the device.
        `ids` and `token` are [E] int32."""
        sorted_ids, entry = torch.sort(ids, stable=True)
        rows = torch.arange(vocabulary + 1, device=ids.device, dtype=torch.int32)
        row_start = torch.searchsorted(sorted_ids, rows, out_int32=True)
        return EntriesById(entry, token[entry], sorted_ids, row_start)


@triton.jit
def _shape_logit(dot, scale, softcap, inverse_temperature, CAPPED: tl.constexpr):
    z = dot * scale
    if CAPPED:
        z = softcap * (2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0)
    return z * inverse_temperature


@triton.jit
def _logit_slope(z, scale, softcap, inverse_temperature, CAPPED: tl.constexpr):
    """Compute the derivative of a logit z (after scaling and soft-capping) with respect to the raw
    dot product, given z."""
    slope = scale * inverse_temperature
    if CAPPED:
        tanh = z / (softcap * inverse_temperature)
        return slope * (1.0 - tanh * tanh)
    else:
        return slope + 0.0 * z


@triton.jit(do_not_specialize=["last"])
def _logits_kernel(
    out, hidden, weight, bias, token, ids, first, last, d, hidden_stride, weight_stride,
    scale, softcap, inverse_temperature,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    entry = first + tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    live = entry < last
    row_t = tl.load(token + entry, mask=live, other=0).to(tl.int64)
    row_v = tl.load(ids + entry, mask=live, other=0).to(tl.int64)
    total = tl.zeros([ENTRIES, COLUMNS], tl.float32)
    for start in range(0, d, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = live[:, None] & (column < d)[None, :]
        h = tl.load(hidden + row_t[:, None] * hidden_stride + column[None, :], mask=inside, other=0)
        w = tl.load(weight + row_v[:, None] * weight_stride + column[None, :], mask=inside, other=0)
        total += h.to(tl.float32) * w.to(tl.float32)
    dot = tl.sum(total, axis=1)
    if BIASED:
        dot += tl.load(bias + row_v, mask=live, other=0).to(tl.float32)
    z = _shape_logit(dot, scale, softcap, inverse_temperature, CAPPED)
    tl.store(out + entry, z, mask=live)


@triton.jit
def _span_kernel(
    logp, entropy, lse, logits, ids, offsets, targets,
    BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    first = tl.load(offsets + t)
    last = tl.load(offsets + t + 1)
    if last > first:
        target = tl.load(targets + t)
        top = float("-inf")
        mass = 0.0
        moment = 0.0
        chosen = float("-inf")
        for start in range(first, last, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            live = entry < last
            z = tl.load(logits + entry, mask=live, other=float("-inf"))
            v = tl.load(ids + entry, mask=live, other=-1)
            new_top = tl.maximum(top, tl.max(z, axis=0))
            fade = tl.exp(top - new_top)
            p = tl.exp(z - new_top)
            mass = mass * fade + tl.sum(p, axis=0)
            moment = moment * fade + tl.sum(p * tl.where(live, z, 0.0), axis=0)
            chosen = tl.maximum(chosen, tl.max(tl.where(v == target, z, float("-inf")), axis=0))
            top = new_top
        total = top + tl.log(mass)
        tl.store(lse + t, total)
        tl.store(logp + t, chosen - total)
        tl.store(entropy + t, total - moment / mass)


@triton.jit(do_not_specialize=["entries"])
def _coefficient_kernel(
    out, logits, ids, token, targets, lse, grad_logp, entries,
    scale, softcap, inverse_temperature,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = entry < entries
    t = tl.load(token + entry, mask=live, other=0)
    v = tl.load(ids + entry, mask=live, other=0)
    z = tl.load(logits + entry, mask=live, other=0)
    p = tl.exp(z - tl.load(lse + t, mask=live, other=0))
    chosen = tl.where(v == tl.load(targets + t, mask=live, other=-1), 1.0, 0.0)
    grad = tl.load(grad_logp + t, mask=live, other=0) * (chosen - p)
    grad *= _logit_slope(z, scale, softcap, inverse_temperature, CAPPED)
    tl.store(out + entry, grad, mask=live)


@triton.jit
def _hidden_gradient_kernel(
    out, coefficient, weight, ids, offsets, d, weight_stride, out_stride,
    ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(offsets + t)
    last = tl.load(offsets + t + 1)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(first, last, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        live = entry < last
        v = tl.load(ids + entry, mask=live, other=0).to(tl.int64)
        c = tl.load(coefficient + entry, mask=live, other=0)
        inside = live[:, None] & (column < d)[None, :]
        w = tl.load(weight + v[:, None] * weight_stride + column[None, :], mask=inside, other=0)
        total += tl.sum(c[:, None] * w.to(tl.float32), axis=0)
    tl.store(out + t * out_stride + column, total.to(out.dtype.element_ty), mask=column < d)


@triton.jit
def _sum_rows(
    total, coefficient, hidden, entry_of, token_of, first, last, column, d, hidden_stride,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, ENTRIES):
        position = start + tl.arange(0, ENTRIES)
        live = position < last
        entry = tl.load(entry_of + position, mask=live, other=0)
        t = tl.load(token_of + position, mask=live, other=0).to(tl.int64)
        c = tl.load(coefficient + entry, mask=live, other=0)
        inside = live[:, None] & (column < d)[None, :]
        h = tl.load(hidden + t[:, None] * hidden_stride + column[None, :], mask=inside, other=0)
        total += tl.sum(c[:, None] * h.to(tl.float32), axis=0)
    return total


@triton.jit
def _part_kernel(
    partial, coefficient, hidden, entry_of, token_of, sorted_ids, d, hidden_stride,
    LONG: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = part * LONG
    last = first + LONG
    if tl.load(sorted_ids + first) == tl.load(sorted_ids + last - 1):
        total = tl.zeros([COLUMNS], tl.float32)
        total = _sum_rows(
            total, coefficient, hidden, entry_of, token_of, first, last, column, d, hidden_stride,
            ENTRIES,
        )  # fmt: skip
        tl.store(partial + part.to(tl.int64) * d + column, total, mask=column < d)


@triton.jit
def _weight_gradient_kernel(
    out, base, partial, coefficient, hidden, entry_of, token_of, row_start, d, hidden_stride,
    BASED: tl.constexpr, LONG: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(row_start + v)
    last = tl.load(row_start + v + 1)
    total = tl.zeros([COLUMNS], tl.float32)
    if BASED:
        total += tl.load(base + v * d + column, mask=column < d, other=0).to(tl.float32)
    # Whole parts inside the row, and the entries before and after them.
    part = tl.cdiv(first, LONG)
    parts = last // LONG - part
    before = last
    if parts > 0:
        before = part * LONG
    total = _sum_rows(
        total, coefficient, hidden, entry_of, token_of, first, before, column, d, hidden_stride,
        ENTRIES,
    )  # fmt: skip
    if parts > 0:
        row = partial + part.to(tl.int64) * d + column
        for _ in range(parts):
            total += tl.load(row, mask=column < d, other=0)
            row += d
        total = _sum_rows(
            total, coefficient, hidden, entry_of, token_of, (part + parts) * LONG, last, column, d,
            hidden_stride, ENTRIES,
        )  # fmt: skip
    tl.store(out + v * d + column, total.to(out.dtype.element_ty), mask=column < d)


@triton.jit
def _bias_gradient_kernel(out, coefficient, entry_of, row_start, BLOCK: tl.constexpr):
    v = tl.program_id(0)
    last = tl.load(row_start + v + 1)
    total = 0.0
    for start in range(tl.load(row_start + v), last, BLOCK):
        position = start + tl.arange(0, BLOCK)
        live = position < last
        entry = tl.load(entry_of + position, mask=live, other=0)
        total += tl.sum(tl.load(coefficient + entry, mask=live, other=0), axis=0)
    tl.store(out + v, tl.load(out + v) + total)


def gather_logits(
    out: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token: Tensor,
    ids: Tensor,
    span: tuple[int, int],
    transform: LogitTransform,
) -> None:
    """Write the logits of sampling-mask entries span[0] to span[1] − 1 to `out` [E] float32."""
    (first, last), tiling = span, _LOGITS
    if last > first:
        _logits_kernel[(triton.cdiv(last - first, tiling.entries),)](
            out, hidden, weight, bias, token, ids, first, last, hidden.shape[1], hidden.stride(0),
            weight.stride(0), transform.scale, transform.softcap, 1.0 / transform.temperature,
            BIASED=bias is not None, CAPPED=transform.softcap > 0,
            ENTRIES=tiling.entries, COLUMNS=tiling.columns, num_warps=tiling.warps,
        )  # fmt: skip


def span_statistics(
    logp: Tensor,
    entropy: Tensor,
    lse: Tensor,
    logits: Tensor,
    ids: Tensor,
    offsets: Tensor,
    targets: Tensor,
) -> None:
    """Write the log-probability, entropy and logsumexp of each token with a non-empty sampling mask
    to [R] float32 tensors. A target outside its mask has a log-probability of −inf."""
    if targets.numel():
        _span_kernel[(targets.numel(),)](
            logp, entropy, lse, logits, ids, offsets, targets, BLOCK=32, num_warps=1
        )


def logit_coefficients(
    logits: Tensor,
    ids: Tensor,
    token: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad_logp: Tensor,
    transform: LogitTransform,
) -> Tensor:
    """Return dL/d(hidden · weight + bias) for each entry, as [E] float32."""
    out = torch.empty_like(logits)
    if logits.numel():
        _coefficient_kernel[(triton.cdiv(logits.numel(), 1024),)](
            out, logits, ids, token, targets, lse, grad_logp, logits.numel(),
            transform.scale, transform.softcap, 1.0 / transform.temperature,
            CAPPED=transform.softcap > 0, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out


def hidden_gradient(
    out: Tensor, coefficient: Tensor, weight: Tensor, ids: Tensor, offsets: Tensor
) -> None:
    """Write the gradient of `hidden` to `out` [R, d], with zeros for tokens without kept ids.
    `offsets` [R+1] index into `ids`."""
    (tokens, d), tiling = out.shape, _HIDDEN_GRADIENT
    if tokens:
        _hidden_gradient_kernel[(tokens, triton.cdiv(d, tiling.columns))](
            out, coefficient, weight, ids, offsets, d, weight.stride(0), out.stride(0),
            ENTRIES=tiling.entries, COLUMNS=tiling.columns, num_warps=tiling.warps,
        )  # fmt: skip


def weight_gradient(
    out: Tensor, base: Tensor | None, coefficient: Tensor, hidden: Tensor, transposed: EntriesById
) -> None:
    """Write `base` plus the gradient of `weight` to all rows of `out` [V, d]. `base` may be the
    same tensor as `out`."""
    (vocabulary, d), tiling = out.shape, _WEIGHT_GRADIENT
    columns = triton.cdiv(d, tiling.columns)
    parts = transposed.ids.numel() // _LONG_ROW
    partial = torch.empty((parts, d), device=out.device, dtype=torch.float32)
    if parts:
        _part_kernel[(parts, columns)](
            partial, coefficient, hidden, transposed.entry, transposed.token, transposed.ids,
            d, hidden.stride(0),
            LONG=_LONG_ROW, ENTRIES=tiling.entries, COLUMNS=tiling.columns, num_warps=tiling.warps,
        )  # fmt: skip
    _weight_gradient_kernel[(vocabulary, columns)](
        out, base, partial, coefficient, hidden, transposed.entry, transposed.token,
        transposed.row_start, d, hidden.stride(0), BASED=base is not None, LONG=_LONG_ROW,
        ENTRIES=tiling.entries, COLUMNS=tiling.columns, num_warps=tiling.warps,
    )  # fmt: skip


def bias_gradient(out: Tensor, coefficient: Tensor, transposed: EntriesById) -> None:
    """Add the gradient of `bias` to `out` [V] float32."""
    _bias_gradient_kernel[(out.numel(),)](
        out, coefficient, transposed.entry, transposed.row_start, BLOCK=128, num_warps=1
    )


_BLOCK_LOGITS = 1 << 27
"""Number of logits in a block, over all tokens. In float32, they take 512 MiB."""


@triton.jit
def _fold_kernel(
    top_of, mass_of, moment_of, chosen_of, dot, bias, targets, start_v, width,
    scale, softcap, inverse_temperature,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + t) - start_v
    top = tl.load(top_of + t)
    mass = tl.load(mass_of + t)
    moment = tl.load(moment_of + t)
    chosen = tl.load(chosen_of + t)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        live = column < width
        x = tl.load(dot + t * width + column, mask=live, other=0)
        if BIASED:
            x += tl.load(bias + start_v + column, mask=live, other=0).to(tl.float32)
        z = _shape_logit(x, scale, softcap, inverse_temperature, CAPPED)
        z = tl.where(live, z, float("-inf"))
        new_top = tl.maximum(top, tl.max(z, axis=0))
        fade = tl.exp(top - new_top)
        p = tl.exp(z - new_top)
        mass = mass * fade + tl.sum(p, axis=0)
        moment = moment * fade + tl.sum(p * tl.where(live, z, 0.0), axis=0)
        chosen = tl.maximum(chosen, tl.max(tl.where(column == target, z, float("-inf")), axis=0))
        top = new_top
    tl.store(top_of + t, top)
    tl.store(mass_of + t, mass)
    tl.store(moment_of + t, moment)
    tl.store(chosen_of + t, chosen)


@triton.jit
def _block_coefficient_kernel(
    out, dot, bias, targets, lse_of, grad_logp, start_v, width,
    scale, softcap, inverse_temperature,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    x = tl.load(dot + t * width + column, mask=live, other=0)
    if BIASED:
        x += tl.load(bias + start_v + column, mask=live, other=0).to(tl.float32)
    z = _shape_logit(x, scale, softcap, inverse_temperature, CAPPED)
    p = tl.exp(z - tl.load(lse_of + t))
    chosen = tl.where(column == tl.load(targets + t) - start_v, 1.0, 0.0)
    grad = tl.load(grad_logp + t) * (chosen - p)
    grad *= _logit_slope(z, scale, softcap, inverse_temperature, CAPPED)
    tl.store(out + t * width + column, grad.to(out.dtype.element_ty), mask=live)


def gemm(left: Tensor, right: Tensor) -> Tensor:
    """Compute left @ right with float32 accumulation and a float32 result."""
    right = right.to(left.dtype)
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _blocks(tokens: int, vocabulary: int) -> list[tuple[int, int]]:
    width = max(256, _BLOCK_LOGITS // max(tokens, 1) // 256 * 256)
    return [(a, min(a + width, vocabulary)) for a in range(0, vocabulary, width)]


def full_statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, transform: LogitTransform
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the log-probability, entropy and logsumexp over the whole vocabulary, each [R]
    float32."""
    tokens = hidden.shape[0]
    top = torch.full((tokens,), float("-inf"), device=hidden.device)
    chosen, mass, moment = top.clone(), torch.zeros_like(top), torch.zeros_like(top)
    for first, last in _blocks(tokens, weight.shape[0]):
        dot = gemm(hidden, weight[first:last].t())
        _fold_kernel[(tokens,)](
            top, mass, moment, chosen, dot, bias, targets, first, last - first,
            transform.scale, transform.softcap, 1.0 / transform.temperature,
            BIASED=bias is not None, CAPPED=transform.softcap > 0, BLOCK=2048, num_warps=8,
        )  # fmt: skip
    lse = top + mass.log()
    return chosen - lse, lse - moment / mass, lse


def full_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    lse: Tensor,
    grad_logp: Tensor,
    transform: LogitTransform,
    *,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> Tensor:
    """Return the gradient of `hidden`, [R, d] float32, and add the gradients of `weight` and `bias`
    to `grad_weight` [V, d] and `grad_bias` [V]. `lse` and `grad_logp` are [R] float32."""
    tokens, d = hidden.shape
    grad_hidden = torch.zeros((tokens, d), device=hidden.device, dtype=torch.float32)
    for first, last in _blocks(tokens, weight.shape[0]):
        width = last - first
        dot = gemm(hidden, weight[first:last].t())
        coefficient = torch.empty((tokens, width), device=hidden.device, dtype=hidden.dtype)
        _block_coefficient_kernel[(tokens, triton.cdiv(width, 1024))](
            coefficient, dot, bias, targets, lse, grad_logp, first, width,
            transform.scale, transform.softcap, 1.0 / transform.temperature,
            BIASED=bias is not None, CAPPED=transform.softcap > 0, BLOCK=1024, num_warps=4,
        )  # fmt: skip
        del dot
        grad_hidden += gemm(coefficient, weight[first:last])
        if grad_weight is not None:
            grad_weight[first:last] += gemm(coefficient.t(), hidden)
        if grad_bias is not None:
            grad_bias[first:last] += coefficient.sum(0, dtype=torch.float32)
    return grad_hidden
