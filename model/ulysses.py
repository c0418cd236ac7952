"""Ulysses sequence parallelism: a packed row cut over ranks, and the trade around attention.

Each of n ranks holds an n-th of the row's tokens. Outside attention a token needs no other, so
embeddings, experts, routers and the head run on the slice alone. For attention one all-to-all
trades tokens for heads: each rank then sees the whole row with an n-th of the heads, and a second
trades back. DeepSpeed Ulysses (Jacobs et al., 2023).

Of DeepSpeed's own two layers for it, `DistributedAttention` trades query, key and value one after
the other, through an autograd function that torch.compile cannot see into, and the one for
transformers wants keys and values of one size (multi-head latent attention has two). PyTorch's
differentiable all-to-all needs neither, and knows torch.compile.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from keel.model.torch_internals import all_to_all

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Slice:
    """This rank's part of every packed row: consecutive tokens, as *inputs* of the network."""

    rank: int = 0
    """Which part, in the order of tokens."""
    size: int = 1
    group: ProcessGroup | None = None
    """The ranks that hold the parts of one row."""

    @staticmethod
    def join(size: int) -> Slice:
        """Of this process, among `size` consecutive ranks. Every rank must call it."""
        if size == 1:
            return WHOLE
        group, _ = dist.new_subgroups(size)
        assert isinstance(group, ProcessGroup)
        return Slice(dist.get_rank(group), size, group)

    def bounds(self, tokens: int) -> tuple[int, int]:
        """First token of the part and the one after its last; slices are equally long, and the
        last ones may reach behind the row's end."""
        length = -(-tokens // self.size)
        return self.rank * length, (self.rank + 1) * length

    def cut(self, whole: NDArray[T], filling: int | bool) -> NDArray[T]:
        """This rank's part of an array with an entry a token, filled up behind the row's end."""
        start, stop = self.bounds(len(whole))
        part = whole[start:stop]
        rest = np.full((stop - start - len(part), *whole.shape[1:]), filling, whole.dtype)
        return np.concatenate([part, rest]) if len(rest) else part

    def filled(self, tokens: int) -> int:
        """Tokens of all parts together that only fill the row up."""
        return -tokens % self.size

    def gather(self, part: Tensor, where: slice, total: int) -> Tensor:
        """[…, r] of each rank, about entries `where` of `total` → [..., total], no gradient."""
        if self.group is None:
            return part.detach()
        whole = part.new_zeros(*part.shape[:-1], total)
        whole[..., where] = part.detach()
        dist.all_reduce(whole, group=self.group)
        return whole


WHOLE = Slice()
"""The part of a rank that shares its rows with no other."""


def heads_for_tokens(
    query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """[P, H, D], this rank's tokens and all heads → [n·P, H/n, D], all tokens and a share of heads.

    Head counts and sizes may differ between the three. Where key and value have fewer heads than
    n, or a number that n does not divide, heads are repeated so that each rank has those that its
    query heads look at. Raises ValueError if n does not divide the query's heads.
    """
    size = dist.get_world_size(group)
    heads, shared = query.shape[1], key.shape[1]
    if heads % size:
        raise ValueError(f"{heads} attention heads cannot be shared out to {size} ranks")
    if times := lcm(shared, size) // shared - 1:
        key, value = (x.repeat_interleave(times + 1, 1) for x in (key, value))
    tensors = (query, key, value)
    parts = [x.unflatten(1, (size, -1)).transpose(0, 1).flatten(1) for x in tensors]
    traded = _trade(torch.cat(parts, 1), group).split([part.shape[1] for part in parts], 1)
    query, key, value = (
        part.reshape(size * len(x), x.shape[1] // size, x.shape[2])
        for part, x in zip(traded, tensors, strict=True)
    )
    return query, key, value


def tokens_for_heads(output: Tensor, group: ProcessGroup) -> Tensor:
    """[n·P, H/n, D] of all tokens → [P, H, D] of this rank's."""
    size = dist.get_world_size(group)
    traded = _trade(output.unflatten(0, (size, -1)).flatten(1), group)
    return traded.reshape(size, -1, *output.shape[1:]).transpose(0, 1).flatten(1, 2)


def _trade(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Row j goes to rank j, and row i comes from rank i: [n, …] → [n, …]."""
    return all_to_all(rows.contiguous(), group)
