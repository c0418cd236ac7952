"""Log-probabilities over sampling masks: the policy as truncated sampling defined it, and no more.

Under Keep Sampling Mask (DeepSeek-V3.2, section 3.1) a token o sampled with the mask S has

    log π(o) = z_o/τ − logsumexp_{v∈S} z_v/τ,      z = cap(scale · (W h + b))

so only the logits in S are needed, forward and backward. A token whose sampling was not truncated
(an empty span) takes the full head, a few rows at a time; its logits are computed again in the
backward pass. No tensor of tokens × vocabulary exists in either case.

This is the PyTorch implementation, which runs everywhere; on a GPU with Triton, `support_head`
hands over to the kernels of `keel.model.head.gpu`.

The index tensors may stay on the CPU while `hidden` is on a GPU. Then planning and checking need
nothing from the GPU, and nothing waits for it; index tensors that are on the GPU cost one wait.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from keel.model.device import to_device
from keel.model.head.checks import check_shapes, check_values
from keel.model.head.ops import (
    Pairs,
    accumulate_dtype,
    gemm_grads,
    gemm_operand,
    matmul,
    pair_grads,
    pair_logits,
    rows_at_once,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """How a model family turns W·h into logits. The default is what most do: nothing more."""

    bias: Tensor | None = None
    """[V], added to W·h."""
    scale: float = 1.0
    """Multiplies W·h + bias."""
    softcap: float | None = None
    """c: scaled logits become c·tanh(z/c)."""

    def __post_init__(self) -> None:
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}, must be above 0 (None: no capping)")


PLAIN = HeadSpec()


def support_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept_ids: Tensor,
    kept_offsets: Tensor,
    *,
    temperature: float = 1.0,
    spec: HeadSpec = PLAIN,
    memo: dict[Any, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target over its sampling mask, and the entropy of that distribution.

    Args:
        hidden: [T, d] floats; row t predicts `targets[t]`.
        weight: [V, d], same dtype and device as `hidden`.
        targets: [T] integers, each inside its own sampling mask.
        kept_ids: [nnz] integers, the sampling masks one after the other.
        kept_offsets: [T+1] integers; token t kept `kept_ids[kept_offsets[t]:kept_offsets[t+1]]`.
            An empty span means the whole vocabulary.
        temperature: τ, above 0.
        spec: bias, scaling and capping of the logits.
        memo: an empty dict at first; what follows from the index tensors alone (their checks, and
            the plan on a GPU) is kept in it for other calls with the same index tensors.

    Returns:
        Both [T] float32 (computed in float64 for float64 inputs). The log-probabilities have
        exact gradients to `hidden`, `weight` and `spec.bias`; the entropy has none. With T = 0
        the gradients exist and are zero.

    Raises:
        ValueError: naming the argument and the row, if shapes or dtypes do not fit, an id or a
            target is outside [0, V), a target is outside its mask, a mask holds an id twice, the
            offsets do not run monotonically from 0 to nnz, or τ is not above 0.
    """
    check_shapes(hidden, weight, targets, kept_ids, kept_offsets, spec.bias, temperature)
    memo = {} if memo is None else memo
    host_offsets = kept_offsets.cpu()
    offsets = host_offsets.numpy().astype(np.int64, copy=False)
    if ("checked", len(weight)) not in memo:
        check_values(targets, kept_ids, offsets, len(weight))
        memo["checked", len(weight)] = True
    if _has_kernels(hidden):
        return _on_gpu(hidden, weight, targets, kept_ids, host_offsets, temperature, spec, memo)

    sizes = np.diff(offsets)
    shape = (spec.bias, temperature, spec.scale, spec.softcap)
    device = hidden.device
    targets = to_device(targets.long(), device)
    ids = to_device(kept_ids.long(), device)
    if sizes.all():  # every token truncated, or no tokens
        pairs = _pairs(ids, offsets, sizes, device)
        return _KeptHead.apply(hidden, weight, *shape, targets, pairs)
    if not len(ids):
        return _FullHead.apply(hidden, weight, *shape, targets)

    # Mixed: truncated tokens first, then the others; each kind by its own way; then back in order.
    truncated = np.flatnonzero(sizes)
    order = np.concatenate([truncated, np.flatnonzero(sizes == 0)])
    sizes = sizes[truncated]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    pairs = _pairs(ids, offsets, sizes, device)
    forward = to_device(torch.from_numpy(order), device)
    back = to_device(torch.from_numpy(np.argsort(order)), device)
    split = [len(truncated), len(order) - len(truncated)]
    hidden_kept, hidden_full = hidden.index_select(0, forward).split(split)
    targets_kept, targets_full = targets.index_select(0, forward).split(split)
    kept = _KeptHead.apply(hidden_kept, weight, *shape, targets_kept, pairs)
    full = _FullHead.apply(hidden_full, weight, *shape, targets_full)
    logp, entropy = (
        torch.cat(parts).index_select(0, back) for parts in zip(kept, full, strict=True)
    )
    return logp, entropy


def _has_kernels(hidden: Tensor) -> bool:
    return (
        hidden.is_cuda
        and len(hidden) > 0
        and hidden.dtype != torch.float64
        and importlib.util.find_spec("triton") is not None
    )


def _on_gpu(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept_ids: Tensor,
    kept_offsets: Tensor,
    temperature: float,
    spec: HeadSpec,
    memo: dict[Any, Any],
) -> tuple[Tensor, Tensor]:
    # Triton exists on GPU machines only.
    from keel.model.head import gpu as support_gpu  # noqa: PLC0415
    from keel.model.head import plan as support_plan  # noqa: PLC0415
    from keel.model.head.kernels import HeadShape  # noqa: PLC0415

    vocab, dim = weight.shape
    device = hidden.device
    if (vocab, dim, device) not in memo:
        memo[vocab, dim, device] = support_plan.build_plan(
            kept_ids, kept_offsets, vocabulary=vocab, d=dim, device=device
        )
    plan = memo[vocab, dim, device]
    shape = HeadShape(scale=spec.scale, softcap=spec.softcap or 0.0, temperature=temperature)
    logp, entropy = support_gpu.fused_head(
        hidden, weight, to_device(targets.long(), device), plan, bias=spec.bias, shape=shape
    )
    return logp, entropy


class _KeptHead(Function):
    """Tokens that were truncated. Holds two floats and two integers per (token, id) pair."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        scale: float,
        softcap: float | None,
        targets: Tensor,
        pairs: Pairs,
    ) -> tuple[Tensor, Tensor]:
        logits = pair_logits(hidden, weight, pairs)
        if bias is not None:
            logits += bias.index_select(0, pairs.ids)
        _shape_logits(logits, temperature, scale, softcap)

        rows = pairs.rows
        highest = _row_reduce(logits, pairs, "max")
        weights = (logits - highest.index_select(0, rows)).exp_()
        total = _row_reduce(weights, pairs, "sum")
        probability = weights.div_(total.index_select(0, rows))
        normaliser = highest + total.log()
        entropy = normaliser - _row_reduce(probability * logits, pairs, "sum")
        at_target = pairs.ids == targets.index_select(0, rows)
        chosen = _row_reduce(logits.masked_fill(~at_target, 0), pairs, "sum")

        # d logp[row] / d raw logit of each pair; what backward needs besides the inputs.
        score = probability.neg_().add_(at_target)
        score.mul_(_slope(logits, temperature, scale, softcap))
        ctx.save_for_backward(hidden, weight, score, pairs.ids, rows)
        ctx.host_offsets = pairs.host_offsets
        ctx.bias_like = None if bias is None else (bias.shape, bias.dtype)
        entropy = entropy.float()
        ctx.mark_non_differentiable(entropy)
        return (chosen - normaliser).float(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, score, ids, rows = ctx.saved_tensors
        grad = score * grad_logp.to(score.dtype).index_select(0, rows)
        pairs = Pairs(ids=ids, rows=rows, host_offsets=ctx.host_offsets)
        d_hidden, d_weight = pair_grads(grad, hidden, weight, pairs, ctx.needs_input_grad[:2])
        d_bias = None
        if ctx.needs_input_grad[2]:
            shape, dtype = ctx.bias_like
            d_bias = grad.new_zeros(shape).index_add_(0, ids, grad).to(dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None


class _FullHead(Function):
    """Tokens whose sampling was not truncated. Holds one float a token beside the inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        scale: float,
        softcap: float | None,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        sums = torch.empty(3, len(hidden), dtype=accumulate_dtype(hidden), device=hidden.device)
        normaliser, chosen, mean = sums
        operand = gemm_operand(weight)
        step = rows_at_once(len(weight), hidden.device)
        for start in range(0, len(hidden), step):
            row = slice(start, start + step)
            logits = _full_logits(hidden[row], operand, bias, temperature, scale, softcap)
            normaliser[row] = logits.logsumexp(-1)
            chosen[row] = logits.gather(1, targets[row, None])[:, 0]
            probability = (logits - normaliser[row, None]).exp_()
            mean[row] = probability.mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.scalars = temperature, scale, softcap
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
        operand = gemm_operand(weight)
        step = rows_at_once(len(weight), hidden.device)
        for start in range(0, len(hidden), step):
            row = slice(start, min(start + step, len(hidden)))
            logits = _full_logits(hidden[row], operand, bias, *ctx.scalars)
            slope = _slope(logits, *ctx.scalars)
            block = logits.sub_(normaliser[row, None]).exp_().mul_(-grad[row, None])
            block.scatter_add_(1, targets[row, None], grad[row, None])
            block.mul_(slope)
            gemm_grads(block, hidden, operand, row, d_hidden, d_weight)
            if d_bias is not None:
                d_bias += block.sum(0)
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *(None,) * 4,
        )


def _full_logits(
    hidden: Tensor,
    operand: Tensor,
    bias: Tensor | None,
    temperature: float,
    scale: float,
    softcap: float | None,
) -> Tensor:
    logits = matmul(gemm_operand(hidden), operand.t())
    if bias is not None:
        logits += bias
    _shape_logits(logits, temperature, scale, softcap)
    return logits


def _shape_logits(logits: Tensor, temperature: float, scale: float, softcap: float | None) -> None:
    """Raw logits into tempered ones, in place."""
    if softcap is None:
        logits.mul_(scale / temperature)
    else:
        logits.mul_(scale / softcap).tanh_().mul_(softcap / temperature)


def _slope(
    logits: Tensor, temperature: float, scale: float, softcap: float | None
) -> Tensor | float:
    """Derivative of tempered logits by raw ones, from the tempered ones."""
    if softcap is None:
        return scale / temperature
    return (1 - (logits * (temperature / softcap)).square_()).mul_(scale / temperature)


def _row_reduce(values: Tensor, pairs: Pairs, how: str) -> Tensor:
    """[T] from [nnz], over each token's pairs."""
    rows = len(pairs.host_offsets) - 1
    if how == "max":
        out = values.new_full((rows,), -torch.inf)
        return out.scatter_reduce_(0, pairs.rows, values, "amax")
    return values.new_zeros(rows).index_add_(0, pairs.rows, values)


def _pairs(ids: Tensor, offsets: np.ndarray, sizes: np.ndarray, device: torch.device) -> Pairs:
    rows = torch.arange(len(sizes), device=device).repeat_interleave(
        to_device(torch.from_numpy(sizes), device), output_size=len(ids)
    )
    return Pairs(ids=ids, rows=rows, host_offsets=offsets)
