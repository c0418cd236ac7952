"""Ulysses sequence parallelism, which splits a packed row over ranks that exchange data before and
after attention.

Each of n ranks holds 1/n of the tokens in the row, which is enough for everything but attention.
For attention, an all-to-all exchanges tokens for heads, so that each rank has the whole row for 1/n
of the heads, and a second one reverses this (DeepSpeed Ulysses, Jacobs et al., 2023). DeepSpeed's
own `DistributedAttention` cannot be compiled, and its layer for transformers requires keys and
values of the same width, which latent attention does not have.

Sparse attention (`keel.model.sparse`) gathers keys instead, because the latent key of a token is
much smaller than the queries and outputs of all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from keel.model.torch_internals import all_to_all

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of each packed row: a range of consecutive *input* tokens."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None

    @staticmethod
    def join(size: int) -> Shard:
        """Form groups of `size` consecutive ranks that share a row. This is a collective, so all
        ranks must call it."""
        if size == 1:
            return WHOLE
        group, _ = dist.new_subgroups(size)
        assert isinstance(group, ProcessGroup)
        return Shard(dist.get_rank(group), size, group)

    def bounds(self, tokens: int) -> tuple[int, int]:
        """Return this shard's bounds. All shards have the same length, so the last ones may extend
        past the end of the row."""
        length = -(-tokens // self.size)
        return self.rank * length, (self.rank + 1) * length

    def cut(self, whole: NDArray[T], filling: int | bool) -> NDArray[T]:
        """Cut this rank's shard out of a per-token array, padding it with `filling` past the end of
        the row."""
        start, stop = self.bounds(len(whole))
        part = whole[start:stop]
        rest = np.full((stop - start - len(part), *whole.shape[1:]), filling, whole.dtype)
        return np.concatenate([part, rest]) if len(rest) else part

    def filled(self, tokens: int) -> int:
        return -tokens % self.size

    def gather(self, part: Tensor, where: slice, total: int) -> Tensor:
        """Concatenate the shards [..., r] of all ranks, without gradients. `where` is the position
        of this rank's shard, and `total` is the length of the result."""
        if self.group is None:
            return part.detach()
        whole = part.new_zeros(*part.shape[:-1], total)
        whole[..., where] = part.detach()
        dist.all_reduce(whole, group=self.group)
        return whole


WHOLE = Shard()
"""The shard of a rank that has whole rows."""


def heads_for_tokens(
    query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange tokens for heads before attention, [P, H, D] → [n·P, H/n, D] for n ranks. Query,
    key and value may have different numbers and sizes of heads. Key and value heads are repeated
    if n does not divide their number. Raises ValueError if n does not divide the number of query
    heads."""
    size = dist.get_world_size(group)
    heads, shared = query.shape[1], key.shape[1]
    if heads % size:
        raise ValueError(f"{heads} attention heads cannot be split over {size} ranks")
    if times := lcm(shared, size) // shared - 1:
        key, value = (x.repeat_interleave(times + 1, 1) for x in (key, value))
    tensors = (query, key, value)
    parts = [x.unflatten(1, (size, -1)).transpose(0, 1).flatten(1) for x in tensors]
    received = _exchange(torch.cat(parts, 1), group).split([part.shape[1] for part in parts], 1)
    query, key, value = (
        part.reshape(size * len(x), x.shape[1] // size, x.shape[2])
        for part, x in zip(received, tensors, strict=True)
    )
    return query, key, value


def tokens_for_heads(output: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange heads for tokens after attention, [n·P, H/n, D] → [P, H, D]."""
    size = dist.get_world_size(group)
    received = _exchange(output.unflatten(0, (size, -1)).flatten(1), group)
    return received.reshape(size, -1, *output.shape[1:]).transpose(0, 1).flatten(1, 2)


def _exchange(rows: Tensor, group: ProcessGroup) -> Tensor:
    return all_to_all(rows.contiguous(), group)


def gather_tokens(part: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate the shards of all ranks, [P, …] → [n·P, …]. The backward pass sums the gradients
    of all ranks in float32."""
    return _GatherTokens.apply(part, group)  # type: ignore[return-value]


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.shape = group, part.shape
        whole = part.new_empty(dist.get_world_size(group) * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.new_empty(ctx.shape, dtype=torch.float32)
        dist.reduce_scatter_tensor(total, grad.float().contiguous(), group=ctx.group)
        return total.to(grad.dtype), None
