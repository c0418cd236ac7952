"""The support head on a GPU: log-probabilities over sampling masks, forward and backward.

Memory is bounded: kept between forward and backward are one float32 logit for each kept id and two
floats per token. Everything else is computed again. Results do not depend on scheduling: there
are no atomics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from keel.model.head import kernels
from keel.model.head.full_kernels import full_gradients, full_statistics, gemm
from keel.model.head.kernels import HeadShape
from keel.model.head.plan import Chunk, SupportPlan


class _SupportHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        plan: SupportPlan,
        shape: HeadShape,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        logits = torch.empty(plan.ids.numel(), device=hidden.device, dtype=torch.float32)
        for chunk in plan.chunks:
            if chunk.union is None:
                kernels.gather_logits(
                    logits, hidden, weight, bias, plan.token, plan.ids, chunk.entries, shape
                )
            else:
                _union_logits(logits, hidden, weight, bias, plan, chunk, shape)
        logp, entropy, lse = hidden.new_empty((3, tokens), dtype=torch.float32).unbind(0)
        kernels.span_statistics(logp, entropy, lse, logits, plan.ids, plan.offsets, targets)
        if plan.full is not None:
            logp[plan.full], entropy[plan.full], lse[plan.full] = full_statistics(
                hidden[plan.full], weight, bias, targets[plan.full], shape
            )
        ctx.save_for_backward(hidden, weight, bias, targets, logits, lse)
        ctx.mark_non_differentiable(entropy)
        ctx.plan, ctx.shape = plan, shape
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, logits, lse = ctx.saved_tensors
        plan: SupportPlan = ctx.plan
        shape: HeadShape = ctx.shape
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_logp = grad_logp.float().contiguous()
        coefficient = kernels.logit_coefficients(
            logits, plan.ids, plan.token, targets, lse, grad_logp, shape
        )
        unions = [chunk for chunk in plan.chunks if chunk.union is not None]
        # The GEMMs add up in `base` before the gathered rows join it; float32 where several
        # chunks meet in one row.
        base = None
        if need_weight and (unions or plan.full is not None):
            base = torch.zeros(
                weight.shape,
                device=weight.device,
                dtype=torch.float32 if unions else weight.dtype,
            )
        grad_bias = torch.zeros(weight.shape[0], device=weight.device) if need_bias else None

        grad_hidden = torch.empty_like(hidden)
        for chunk in plan.chunks:
            first, last = chunk.tokens
            if chunk.union is not None:
                _union_gradients(
                    coefficient, hidden, weight, plan, chunk, grad_hidden, base, grad_bias
                )
            elif need_hidden:
                kernels.hidden_gradient(
                    grad_hidden[first:last],
                    coefficient,
                    weight,
                    plan.ids,
                    plan.offsets[first : last + 1],
                )
        if plan.full is not None:
            rows = plan.full
            grad_hidden[rows] = full_gradients(
                hidden[rows],
                weight,
                bias,
                targets[rows],
                lse[rows],
                grad_logp[rows],
                shape,
                grad_weight=base,
                grad_bias=grad_bias,
            ).to(hidden.dtype)
        grad_weight = None
        if need_weight:
            if base is not None and base.dtype == weight.dtype:
                grad_weight = base
            else:
                grad_weight = torch.empty(weight.shape, device=weight.device, dtype=weight.dtype)
            if plan.ids.numel() or grad_weight is not base:
                kernels.weight_gradient(grad_weight, base, coefficient, hidden, plan.transposed)
        if grad_bias is not None:
            if plan.ids.numel():
                kernels.bias_gradient(grad_bias, coefficient, plan.transposed)
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden if need_hidden else None, grad_weight, grad_bias, None, None, None


def _union_logits(
    out: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: SupportPlan,
    chunk: Chunk,
    shape: HeadShape,
) -> None:
    (first, last), (start, stop) = chunk.tokens, chunk.entries
    assert chunk.union is not None
    dot = gemm(hidden[first:last], weight[chunk.union].t())
    z = dot[plan.token[start:stop] - first, chunk.column]
    if bias is not None:
        z += bias[plan.ids[start:stop]].float()
    z *= shape.scale
    if shape.softcap > 0:
        z = shape.softcap * torch.tanh(z / shape.softcap)
    out[start:stop] = z / shape.temperature


def _union_gradients(
    coefficient: Tensor,
    hidden: Tensor,
    weight: Tensor,
    plan: SupportPlan,
    chunk: Chunk,
    grad_hidden: Tensor,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    """Write rows of grad_hidden; add to grad_weight and grad_bias."""
    (first, last), (start, stop) = chunk.tokens, chunk.entries
    assert chunk.union is not None
    dense = torch.zeros(
        (last - first, chunk.union.numel()), device=hidden.device, dtype=hidden.dtype
    )
    dense[plan.token[start:stop] - first, chunk.column] = coefficient[start:stop].to(hidden.dtype)
    # Through float32: a GEMM into bfloat16 may also sum its parts in bfloat16.
    grad_hidden[first:last] = gemm(dense, weight[chunk.union])
    # An id occurs once in a union, and its padding adds zeros, so these sums have one order.
    if grad_weight is not None:
        grad_weight.index_add_(0, chunk.union, gemm(dense.t(), hidden[first:last]))
    if grad_bias is not None:
        grad_bias.index_add_(0, chunk.union, dense.sum(0, dtype=torch.float32))


def fused_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    plan: SupportPlan,
    *,
    bias: Tensor | None = None,
    shape: HeadShape | None = None,
) -> tuple[Tensor, Tensor]:
    """(log π(target), entropy) of each token over its sampling mask, both [T] float32.

    The log-probability has gradients to hidden, weight and bias; the entropy has none.

    hidden [T, d] and weight [V, d] in bfloat16, float16 or float32; targets [T] integers; bias [V].
    An id must not occur twice in a sampling mask. A target outside its mask has log-probability
    −inf.
    """
    return _SupportHead.apply(  # type: ignore[return-value]
        hidden if hidden.stride(-1) == 1 else hidden.contiguous(),
        weight if weight.stride(-1) == 1 else weight.contiguous(),
        bias,
        targets,
        plan,
        shape or HeadShape(),
    )
