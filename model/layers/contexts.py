"""Copy shared prefixes for attention.

A packed row contains a shared prefix only once (`keel.rl.packing.prefix_sharing`), but attention
needs contiguous keys and values for each context. The prefix is therefore copied into each context.
The backward pass sums the gradients in float32 and in a fixed order, so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.model.torch_internals import to_device


@dataclass(frozen=True, slots=True)
class Contexts:
    """The contexts of S segments. A context consists of the shared prefix that the segment follows,
    if any, and the segment itself."""

    rows: Tensor
    """[M] packed token at each position in the concatenated contexts."""
    offsets: Tensor
    """[S+1] int32. Context s occupies the positions offsets[s] … offsets[s+1]−1."""
    longest: int
    lengths: tuple[int, ...]
    places: Tensor
    """[N] position of each packed token in its own segment's context."""
    shared: Tensor
    """[Q] packed tokens that also occur in other contexts."""
    others: Tensor
    """Positions of these shared tokens in other contexts, grouped by token."""
    counts: Tensor
    """[Q] number of other contexts that contain each shared token."""

    @staticmethod
    def build(
        lengths: Sequence[int], follows: Sequence[int], device: torch.device | str = "cpu"
    ) -> Contexts:
        """Build the contexts of segments. `follows` has the index of the earlier segment that each
        segment continues, or −1."""
        local, before = np.asarray(lengths), np.asarray(follows)
        started = np.where(before >= 0, local[before], 0)
        whole = started + local
        starts, offsets = (np.concatenate([[0], each.cumsum()]) for each in (local, whole))
        rows, places, shared, others, counts = [], [], [], [], []
        for s, first in enumerate(before):
            if first >= 0:
                rows.append(np.arange(starts[first], starts[first + 1]))
            rows.append(np.arange(starts[s], starts[s + 1]))
            places.append(np.arange(offsets[s] + started[s], offsets[s + 1]))
            if len(followers := np.flatnonzero(before == s)):
                shared.append(np.arange(starts[s], starts[s + 1]))
                others.append(np.add.outer(np.arange(local[s]), offsets[followers]).ravel())
                counts.append(np.full(local[s], len(followers)))
        none = np.zeros(0, np.int64)
        index = [np.concatenate(each or [none]) for each in (rows, places, shared, others, counts)]
        moved = [to_device(torch.from_numpy(each.astype(np.int64)), device) for each in index]
        return Contexts(
            moved[0],
            to_device(torch.from_numpy(offsets.astype(np.int32)), device),
            int(whole.max()),
            tuple(whole.tolist()),
            *moved[1:],
        )

    def expand(self, x: Tensor) -> Tensor:
        """Copy packed tokens [N, …] to their positions in the contexts, [M, …]."""
        return _spread(x, self.rows, self.places, self.shared, self.others, self.counts)


@torch.library.custom_op("keel::spread_contexts", mutates_args=())
def _spread(
    x: Tensor, rows: Tensor, places: Tensor, shared: Tensor, others: Tensor, counts: Tensor
) -> Tensor:
    return x.index_select(0, rows)


@_spread.register_fake
def _(x: Tensor, rows: Tensor, *rest: Tensor) -> Tensor:
    return x.new_empty((rows.shape[0], *x.shape[1:]))


@torch.library.custom_op("keel::gather_contexts", mutates_args=())
def _gather(
    slope: Tensor, places: Tensor, shared: Tensor, others: Tensor, counts: Tensor
) -> Tensor:
    """Sum the gradients of all positions [M, …] over the copies of each packed token, giving [N,
    …]."""
    grads = slope.index_select(0, places)
    exact = torch.promote_types(slope.dtype, torch.float32)
    copies = slope.index_select(0, others).to(exact).flatten(1)
    added = torch.segment_reduce(copies, "sum", lengths=counts, unsafe=True)
    total = grads.index_select(0, shared).to(exact) + added.unflatten(1, slope.shape[1:])
    return grads.index_copy_(0, shared, total.to(slope.dtype))


@_gather.register_fake
def _(slope: Tensor, places: Tensor, *rest: Tensor) -> Tensor:
    return slope.new_empty((places.shape[0], *slope.shape[1:]))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[2:])


def _slope(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    return _gather(slope.contiguous(), *ctx.saved_tensors), None, None, None, None, None


_spread.register_autograd(_slope, setup_context=_keep)
