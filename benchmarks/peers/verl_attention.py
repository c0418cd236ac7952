"""What verl takes from the package flash-attn, over the kernels that torch has.

verl imports this module in each of its processes (`actor_rollout_ref.model.external_lib`).
flash-attn comes as source alone and takes an hour to build; torch has the same FlashAttention-2
kernels. So `NAME` is an attention of transformers that calls them on packed sequences, with offsets
read once a micro-batch from the position ids (with flash-attn, transformers reads them again in
every layer). And `verl_cross_entropy` stands for flash-attn's; without one verl would go through
the logits row by row.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

NAME = "torch_varlen"
"""Without the word flash, by which transformers would look for a package."""
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
    """Offsets of the position ids asked for last: those of all layers of a micro-batch."""

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
    for start, stop in pairwise(bounds):
        one, keys, values = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        made = F.scaled_dot_product_attention(
            one, keys, values, is_causal=True, scale=scaling, enable_gqa=True
        )
        outputs.append(made.transpose(0, 1))
    return torch.cat(outputs)


def install() -> None:
    """Make both known: to transformers, and to the module of verl that looks for flash-attn."""
    AttentionInterface.register(NAME, attention)
    if not torch.cuda.is_available():
        return
    # ruff: noqa: PLC0415  where there is no GPU, none of it is needed
    from verl.utils import torch_functional  # pyright: ignore[reportMissingImports]

    from benchmarks.peers.verl_cross_entropy import cross_entropy_loss

    if not torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
        torch_functional.cross_entropy_loss = cross_entropy_loss
        torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = True


if find_spec("verl") is not None:
    install()
