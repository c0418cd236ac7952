"""The support head on a GPU, which computes log-probabilities over sampling masks, forward and
backward.

A method for each token is planned before any kernel runs:

| plan   | used for                             | work                                         |
|--------|--------------------------------------|----------------------------------------------|
| gather | small sampling masks                 | one row of the head per kept id              |
| union  | large sampling masks that overlap    | one GEMM with the rows that any token kept   |
| full   | tokens without truncation            | one GEMM with the whole head                 |

A plan depends on the sampling masks only. Planning from host tensors needs no synchronisation, and
all passes over a micro-batch share one plan: policy, reference, forward and backward.

Between forward and backward, only one float32 logit per kept id and two floats per token are kept;
everything else is recomputed. Results are deterministic, because there are no atomics.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from keel.model.head.cpu import LogitTransform
from keel.model.head.kernels import (
    EntriesById,
    bias_gradient,
    full_gradients,
    full_statistics,
    gather_logits,
    gemm,
    hidden_gradient,
    logit_coefficients,
    span_statistics,
    weight_gradient,
)
from keel.model.torch_internals import to_device

_CHUNK_TOKENS = 2048
_UNION_FLOOR = 128
"""Below this mean number of ids per token, gather is chosen without computing the union."""
_ALIGNMENT = 64
"""Unions are padded to a multiple of this size, because GEMMs use slower kernels for
other widths."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive tokens that use the same method (gather or union), and the range of their entries
    in the array of kept ids."""

    tokens: tuple[int, int]
    entries: tuple[int, int]
    union: Tensor | None = None
    """[U] int64, all ids kept by any of the tokens, in ascending order and padded with unused zeros
    to a multiple of `_ALIGNMENT`. None for the gather plan."""
    column: Tensor | None = None
    """[entries] int64, position of each entry's id in `union`."""


@dataclass(frozen=True)
class SupportPlan:
    """Sampling masks on the device, divided into chunks of tokens."""

    vocabulary: int
    ids: Tensor
    """[E] int32."""
    offsets: Tensor
    """[R+1] int64."""
    token: Tensor
    """[E] int32, token of each entry."""
    chunks: tuple[_Chunk, ...]
    full: Tensor | None
    """[F] int64, tokens that were sampled without truncation. None if all were truncated."""

    @cached_property
    def transposed(self) -> EntriesById:
        """The entries of all chunks that use the gather method, merged and sorted by id."""
        if all(chunk.union is None for chunk in self.chunks):
            return EntriesById.build(self.ids, self.token, self.vocabulary)
        spans = [
            torch.arange(*chunk.entries, device=self.ids.device)
            for chunk in self.chunks
            if chunk.union is None
        ]
        entry = torch.cat(spans) if spans else self.ids.new_zeros(0, dtype=torch.int64)
        part = EntriesById.build(self.ids[entry], self.token[entry], self.vocabulary)
        return part._replace(entry=entry[part.entry])


def _union_is_cheaper(entries: int, tokens: int, union: int, d: int) -> bool:
    """Estimate whether one GEMM over `union` rows is faster than reading one row per entry. The
    constants were fitted on an H200 for d from 640 to 2,048."""
    gather = entries * (9e-11 + d * 2.35e-13)
    product = tokens * union * (4e-13 + d * 4e-15) + 6.5e-5
    return product < gather


def build_plan(
    kept_ids: Tensor, kept_offsets: Tensor, *, vocabulary: int, d: int, device: torch.device
) -> SupportPlan:
    """Choose a method for each chunk of tokens. `kept_ids` [E] and `kept_offsets` [R+1] are
    integers on any device. Planning doesn't wait for the GPU if they are in host memory. Ids must
    be in [0, vocabulary) and unique within a token."""
    host_offsets = kept_offsets.cpu().numpy()
    sizes = np.diff(host_offsets)
    tokens = len(sizes)
    chunks: list[_Chunk] = []
    gathered = 0

    def entries(first: int, last: int) -> tuple[int, int]:
        return int(host_offsets[first]), int(host_offsets[last])

    for first in range(0, tokens, _CHUNK_TOKENS):
        last = min(first + _CHUNK_TOKENS, tokens)
        start, stop = entries(first, last)
        union = _find_union(kept_ids[start:stop], last - first, vocabulary, d)
        if union is None:
            continue
        if gathered < first:
            chunks.append(_Chunk((gathered, first), entries(gathered, first)))
        members, column = (to_device(part, device) for part in union)
        chunks.append(_Chunk((first, last), (start, stop), members, column))
        gathered = last
    if gathered < tokens:
        chunks.append(_Chunk((gathered, tokens), entries(gathered, tokens)))
    offsets = to_device(kept_offsets.long(), device)
    token = torch.arange(tokens, dtype=torch.int32, device=device)
    full = None
    if not sizes.all():
        full = to_device(torch.from_numpy(np.flatnonzero(sizes == 0)), device)
    return SupportPlan(
        vocabulary=vocabulary,
        ids=to_device(kept_ids.int(), device),
        offsets=offsets,
        token=token.repeat_interleave(offsets.diff(), output_size=len(kept_ids)),
        chunks=tuple(chunks),
        full=full,
    )


def _find_union(
    kept_ids: Tensor, tokens: int, vocabulary: int, d: int
) -> tuple[Tensor, Tensor] | None:
    """Return the union of `kept_ids` and the position of each entry in the union, or None if
    gathering one row per entry is faster."""
    entries = len(kept_ids)
    # The union is at least as large as the mean mask.
    if entries < _UNION_FLOOR * tokens:
        return None
    if not _union_is_cheaper(entries, tokens, entries // tokens, d):
        return None
    ids = kept_ids.long()
    kept = torch.zeros(vocabulary, dtype=torch.bool, device=ids.device)
    kept[ids] = True
    members = kept.nonzero().squeeze(1)
    if not _union_is_cheaper(entries, tokens, len(members), d):
        return None
    padded = torch.nn.functional.pad(members, (0, -len(members) % _ALIGNMENT))
    return padded, (kept.cumsum(0) - 1)[ids]


class _SupportHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        plan: SupportPlan,
        transform: LogitTransform,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        logits = torch.empty(plan.ids.numel(), device=hidden.device, dtype=torch.float32)
        for chunk in plan.chunks:
            if chunk.union is None:
                gather_logits(
                    logits, hidden, weight, bias, plan.token, plan.ids, chunk.entries, transform
                )
                continue
            (first, last), (start, stop) = chunk.tokens, chunk.entries
            dot = gemm(hidden[first:last], weight[chunk.union].t())
            z = dot[plan.token[start:stop] - first, chunk.column]
            if bias is not None:
                z += bias[plan.ids[start:stop]].float()
            z *= transform.scale
            if transform.softcap > 0:
                z = transform.softcap * torch.tanh(z / transform.softcap)
            logits[start:stop] = z / transform.temperature
            del dot, z  # before the next chunk allocates its own
        logp, entropy, lse = hidden.new_empty((3, tokens), dtype=torch.float32).unbind(0)
        span_statistics(logp, entropy, lse, logits, plan.ids, plan.offsets, targets)
        if plan.full is not None:
            logp[plan.full], entropy[plan.full], lse[plan.full] = full_statistics(
                hidden[plan.full], weight, bias, targets[plan.full], transform
            )
        ctx.save_for_backward(hidden, weight, bias, targets, logits, lse)
        ctx.mark_non_differentiable(entropy)
        ctx.plan, ctx.transform = plan, transform
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, logits, lse = ctx.saved_tensors
        plan: SupportPlan = ctx.plan
        transform: LogitTransform = ctx.transform
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_logp = grad_logp.float().contiguous()
        coefficient = logit_coefficients(
            logits, plan.ids, plan.token, targets, lse, grad_logp, transform
        )
        unions = [chunk for chunk in plan.chunks if chunk.union is not None]
        # GEMMs accumulate in `base` before the gathered rows are added, in float32 if several
        # chunks contribute to a row.
        base = None
        if need_weight and (unions or plan.full is not None):
            base = torch.zeros(
                weight.shape, device=weight.device, dtype=torch.float32 if unions else weight.dtype
            )
        grad_bias = torch.zeros(weight.shape[0], device=weight.device) if need_bias else None

        grad_hidden = torch.empty_like(hidden)
        for chunk in plan.chunks:
            (first, last), (start, stop) = chunk.tokens, chunk.entries
            if chunk.union is None:
                if need_hidden:
                    offsets = plan.offsets[first : last + 1]
                    hidden_gradient(grad_hidden[first:last], coefficient, weight, plan.ids, offsets)
                continue
            dense = hidden.new_zeros((last - first, chunk.union.numel()))
            row = plan.token[start:stop] - first
            dense[row, chunk.column] = coefficient[start:stop].to(hidden.dtype)
            # Via float32, because a GEMM with a bfloat16 result may also sum in bfloat16.
            grad_hidden[first:last] = gemm(dense, weight[chunk.union])
            # Ids of a union are unique and its padding adds zeros, so the order of sums is fixed.
            if base is not None:
                base.index_add_(0, chunk.union, gemm(dense.t(), hidden[first:last]))
            if grad_bias is not None:
                grad_bias.index_add_(0, chunk.union, dense.sum(0, dtype=torch.float32))
            del dense, row
        if plan.full is not None:
            rows = plan.full
            grad_hidden[rows] = full_gradients(
                hidden[rows],
                weight,
                bias,
                targets[rows],
                lse[rows],
                grad_logp[rows],
                transform,
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
                weight_gradient(grad_weight, base, coefficient, hidden, plan.transposed)
        if grad_bias is not None:
            if plan.ids.numel():
                bias_gradient(grad_bias, coefficient, plan.transposed)
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden if need_hidden else None, grad_weight, grad_bias, None, None, None


def fused_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    plan: SupportPlan,
    *,
    bias: Tensor | None = None,
    transform: LogitTransform,
) -> tuple[Tensor, Tensor]:
    """Compute log π(target) and the entropy of each token over its sampling mask, both [R] float32.
    Only the log-probability is differentiable, with respect to `hidden`, `weight` and `bias`.
    `hidden` [R, d] and `weight` [V, d] are bfloat16, float16 or float32, `targets` [R] are
    integers, and `bias` is [V]. The ids in a sampling mask must be unique. A target outside its
    mask has a log-probability of −inf."""
    return _SupportHead.apply(  # type: ignore[return-value]
        hidden if hidden.stride(-1) == 1 else hidden.contiguous(),
        weight if weight.stride(-1) == 1 else weight.contiguous(),
        bias,
        targets,
        plan,
        transform,
    )
