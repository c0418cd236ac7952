"""Replacement for flash-attn in verl's arm, based on torch's FlashAttention-2 kernels.

verl imports this module in each process (`actor_rollout_ref.model.external_lib`), because
flash-attn has no wheels and takes an hour to build. `NAME` is an attention function of transformers
that calls torch's kernels on packed sequences and reads their offsets from the position ids once
per micro-batch instead of once per layer.
"""

import inspect
import weakref
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

NAME = "torch_varlen"
"""Must not contain "flash", or transformers looks for the package."""
_TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True)
class Packed:
    """Offsets of the sequences in a packed row."""

    offsets: Tensor
    """[S+1] int32"""
    longest: int


def packed(position_ids: Tensor) -> Packed:
    """Read the offsets from position ids [1, N]; a sequence starts at each position 0."""
    positions = position_ids.reshape(-1)
    starts = (positions == 0).nonzero().reshape(-1)
    offsets = F.pad(starts, (0, 1), value=positions.numel()).to(torch.int32)
    return Packed(offsets, int(offsets.diff().max()))


class Latest:
    """Cache of the latest offsets, shared by all layers of a micro-batch."""

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
    """Attention function of transformers: takes [1, heads, N, D], with fewer heads for keys and
    values, and returns [1, N, heads, D]."""
    if position_ids is None or query.shape[0] != 1 or attention_mask is not None:
        raise ValueError(f"{NAME} needs one packed row without a mask: set use_remove_padding=True")
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
    assert isinstance(made, Tensor)  # without statistics
    return made


def _reference(q: Tensor, k: Tensor, v: Tensor, row: Packed, scaling: float | None) -> Tensor:
    """Compute the same on a CPU, one sequence at a time."""
    bounds, outputs = row.offsets.tolist(), []
    for start, stop in pairwise(bounds):
        one, keys, values = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        made = F.scaled_dot_product_attention(
            one, keys, values, is_causal=True, scale=scaling, enable_gqa=True
        )
        outputs.append(made.transpose(0, 1))
    return torch.cat(outputs)


AttentionInterface.register(NAME, attention)
