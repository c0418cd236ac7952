"""The full head on a GPU, for tokens whose sampling was not truncated.

The vocabulary is walked in blocks: a GEMM makes the logits of one block in float32, and
one kernel folds them into running statistics (forward) or turns them into gradients of the logits
(backward). Only one block of logits exists at a time, and every block of the weight gradient is
finished in one GEMM over all tokens.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false
# (Triton types neither the launch options of a kernel nor arithmetic inside one.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from keel.model.head.kernels import HeadShape, logit_slope, shape_logit

BLOCK_LOGITS = 1 << 27
"""Logits of one block over all tokens: 512 MiB in float32."""


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
        z = shape_logit(x, scale, softcap, inverse_temperature, CAPPED)
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
    z = shape_logit(x, scale, softcap, inverse_temperature, CAPPED)
    p = tl.exp(z - tl.load(lse_of + t))
    chosen = tl.where(column == tl.load(targets + t) - start_v, 1.0, 0.0)
    grad = tl.load(grad_logp + t) * (chosen - p)
    grad *= logit_slope(z, scale, softcap, inverse_temperature, CAPPED)
    tl.store(out + t * width + column, grad.to(out.dtype.element_ty), mask=live)


def gemm(left: Tensor, right: Tensor) -> Tensor:
    """left @ right with float32 sums and a float32 result, from operands of any one dtype."""
    right = right.to(left.dtype)
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _blocks(tokens: int, vocabulary: int) -> list[tuple[int, int]]:
    width = max(256, BLOCK_LOGITS // max(tokens, 1) // 256 * 256)
    return [(a, min(a + width, vocabulary)) for a in range(0, vocabulary, width)]


def full_statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, shape: HeadShape
) -> tuple[Tensor, Tensor, Tensor]:
    """logp, entropy and logsumexp [T] float32 over the whole vocabulary."""
    tokens = hidden.shape[0]
    top = torch.full((tokens,), float("-inf"), device=hidden.device)
    chosen, mass, moment = top.clone(), torch.zeros_like(top), torch.zeros_like(top)
    for first, last in _blocks(tokens, weight.shape[0]):
        dot = gemm(hidden, weight[first:last].t())
        _fold_kernel[(tokens,)](
            top, mass, moment, chosen, dot, bias, targets, first, last - first,
            shape.scale, shape.softcap, 1.0 / shape.temperature,
            BIASED=bias is not None, CAPPED=shape.softcap > 0, BLOCK=2048, num_warps=8,
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
    shape: HeadShape,
    *,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> Tensor:
    """Gradient of hidden [T, d] in float32; adds to grad_weight [V, d] and grad_bias [V].

    lse and grad_logp are [T] float32.
    """
    tokens, d = hidden.shape
    grad_hidden = torch.zeros((tokens, d), device=hidden.device, dtype=torch.float32)
    for first, last in _blocks(tokens, weight.shape[0]):
        width = last - first
        dot = gemm(hidden, weight[first:last].t())
        coefficient = torch.empty((tokens, width), device=hidden.device, dtype=hidden.dtype)
        _block_coefficient_kernel[(tokens, triton.cdiv(width, 1024))](
            coefficient, dot, bias, targets, lse, grad_logp, first, width,
            shape.scale, shape.softcap, 1.0 / shape.temperature,
            BIASED=bias is not None, CAPPED=shape.softcap > 0, BLOCK=1024, num_warps=4,
        )  # fmt: skip
        del dot
        grad_hidden += gemm(coefficient, weight[first:last])
        if grad_weight is not None:
            grad_weight[first:last] += gemm(coefficient.t(), hidden)
        if grad_bias is not None:
            grad_bias[first:last] += coefficient.sum(0, dtype=torch.float32)
    return grad_hidden
