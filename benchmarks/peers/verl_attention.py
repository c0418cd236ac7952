"""What verl takes from the package flash-attn, over the kernels that torch has.

verl imports this module in each of its processes (`actor_rollout_ref.model.external_lib`). flash-attn
comes as source alone and takes an hour to build; torch has the same FlashAttention-2 kernels. So
`NAME` is an attention of transformers that calls them on packed sequences, with offsets read once a
micro-batch from the position ids (with flash-attn, transformers reads them again in every layer).
And `cross_entropy_loss` stands for flash-attn's: one pass over the logits forward, one backward,
the gradient where the logits were. Without it verl would go through the logits row by row.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's builds for CPUs come without
    triton = None

NAME = "torch_flash_attention"
_TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True)
class Packed:
    """Where the sequences of a packed row begin."""

    offsets: Tensor
    """[S+1] int32"""
    longest: int


def packed(position_ids: Tensor) -> Packed:
    """A sequence begins wherever the position is 0. Shape: [1, N]."""
    positions = position_ids.reshape(-1)
    starts = (positions == 0).nonzero().reshape(-1)
    offsets = F.pad(starts, (0, 1), value=positions.numel()).to(torch.int32)
    return Packed(offsets, int(offsets.diff().max()))


class Latest:
    """Offsets of the position ids that were asked for last: those of all layers of a micro-batch."""

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._packed: Packed | None = None

    def packed(self, position_ids: Tensor) -> Packed:
        if self._packed is None or self._of is None or self._of() is not position_ids:
            self._packed, self._of = packed(position_ids), weakref.ref(position_ids)
        return self._packed


_latest = Latest()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: [1, heads, N, D] with fewer heads for keys and values; returns
    [1, N, heads, D]."""
    if position_ids is None or query.shape[0] != 1 or attention_mask is not None:
        raise ValueError(f"{NAME} takes one packed row without a mask: use_remove_padding=True")
    row = _latest.packed(position_ids)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if q.dtype == torch.float32 and torch.is_autocast_enabled(q.device.type):
        half = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(half), k.to(half), v.to(half)
    operator = _flash if q.is_cuda else _reference
    return operator(q, k, v, row, scaling).unsqueeze(0), None


def _flash(q: Tensor, k: Tensor, v: Tensor, row: Packed, scaling: float | None) -> Tensor:
    options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if _TAKES_GQA else {}
    made = varlen_attn(
        q,
        k,
        v,
        row.offsets,
        row.offsets,
        row.longest,
        row.longest,
        scale=scaling,
        window_size=(-1, 0),  # causal
        **options,
    )
    assert isinstance(made, Tensor)  # and not with statistics
    return made


def _reference(q: Tensor, k: Tensor, v: Tensor, row: Packed, scaling: float | None) -> Tensor:
    """The same without a GPU, sequence by sequence."""
    bounds, outputs = row.offsets.tolist(), []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        one = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        made = F.scaled_dot_product_attention(*one, is_causal=True, scale=scaling, enable_gqa=True)
        outputs.append(made.transpose(0, 1))
    return torch.cat(outputs)


if triton is not None:

    @triton.jit
    def _losses(logits, labels, losses, lse, stride, columns, BLOCK: tl.constexpr):  # noqa: N803
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
    def _gradients(
        logits,
        labels,
        lse,
        upstream,
        gradient,
        stride,
        columns,
        BLOCK: tl.constexpr,  # noqa: N803
    ):
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
                logits, labels, losses, lse, logits.stride(0), logits.shape[1], BLOCK=4096
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
            _gradients[(rows, triton.cdiv(columns, 4096))](
                logits,
                labels,
                lse,
                upstream[0].contiguous(),
                gradient,
                logits.stride(0),
                columns,
                BLOCK=4096,
            )
        return gradient, None, None


def cross_entropy_loss(
    logits: Tensor, labels: Tensor, inplace_backward: bool = False
) -> tuple[Tensor, Tensor]:
    """Losses per row, and flash-attn's second output, which verl does not read."""
    losses = CrossEntropy.apply(logits, labels, inplace_backward)
    return losses, torch.zeros_like(losses)


def install() -> None:
    """Make both known, here and to the modules of verl that look for flash-attn."""
    AttentionInterface.register(NAME, attention)
    if triton is None:
        return
    from verl.utils import torch_functional  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    if not torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
        torch_functional.cross_entropy_loss = cross_entropy_loss
        torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = True


if find_spec("verl") is not None:
    install()
