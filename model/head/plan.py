"""How each token's log-probability is computed on a GPU, decided before any kernel runs.

| plan   | for                                  | work                                         |
|--------|--------------------------------------|----------------------------------------------|
| gather | small sampling masks                 | one row of the head for each kept id         |
| union  | large sampling masks that overlap    | one GEMM with the rows any token kept        |
| full   | tokens that were not truncated       | one GEMM with the whole head                 |

A plan depends on the sampling masks alone. From host tensors (ahead of time, beside packing) it
costs no synchronisation with the device, and one plan serves every pass over a micro-batch:
policy, reference, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keel.model.device import to_device
from keel.model.head.kernels import Transposed, entry_tokens, transpose_entries

CHUNK_TOKENS = 2048
"""Tokens that share one choice between gather and union."""
UNION_FLOOR = 128
"""Mean kept ids of a chunk under which the gather is taken without counting the union."""
ALIGNMENT = 64
"""Unions are padded to a multiple: GEMMs of other widths take far slower kernels."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens under one plan, with their entries (positions in the kept ids)."""

    tokens: tuple[int, int]
    entries: tuple[int, int]
    union: Tensor | None = None
    """[U] int64, ids that any of the tokens kept, ascending, then zeros that nothing refers to up
    to a multiple of `ALIGNMENT`. None: gather."""
    column: Tensor | None = None
    """[entries] int64, position of each entry's id in `union`."""


@dataclass(frozen=True)
class SupportPlan:
    """Sampling masks on the device, cut into chunks."""

    vocabulary: int
    ids: Tensor
    """[E] int32."""
    offsets: Tensor
    """[T+1] int64."""
    token: Tensor
    """[E] int32, the token of each entry."""
    chunks: tuple[Chunk, ...]
    full: Tensor | None
    """[F] int64, tokens that were not truncated. None: there is none."""

    @cached_property
    def transposed(self) -> Transposed:
        """The entries of all gather chunks, sorted by id."""
        if all(chunk.union is None for chunk in self.chunks):
            return transpose_entries(self.ids, self.token, self.vocabulary)
        spans = [
            torch.arange(*chunk.entries, device=self.ids.device)
            for chunk in self.chunks
            if chunk.union is None
        ]
        entry = torch.cat(spans) if spans else self.ids.new_zeros(0, dtype=torch.int64)
        part = transpose_entries(self.ids[entry], self.token[entry], self.vocabulary)
        return part._replace(entry=entry[part.entry])


def union_is_cheaper(entries: int, tokens: int, union: int, d: int) -> bool:
    """Whether one GEMM over `union` rows beats reading one row for each of `entries` kept ids.

    Seconds of one pass, fitted on one H200 (d 640 to 2,048); forward and both gradients repeat
    either in proportion, and other devices change little in the choice.
    """
    gather = entries * (9e-11 + d * 2.35e-13)
    gemm = tokens * union * (4e-13 + d * 4e-15) + 6.5e-5
    return gemm < gather


def build_plan(
    kept_ids: Tensor, kept_offsets: Tensor, *, vocabulary: int, d: int, device: torch.device
) -> SupportPlan:
    """Choose a plan for each chunk of tokens.

    kept_ids [E] and kept_offsets [T+1] are integers on any device. From the host the plan is made
    without waiting for the device; offsets that live on the device are read back once, and so is
    the size of each union worth counting. Ids must lie in [0, vocabulary) and differ within a
    token.
    """
    host_offsets = kept_offsets.cpu().numpy()
    sizes = np.diff(host_offsets)
    offsets = to_device(kept_offsets.long(), device)
    ids = to_device(kept_ids.int(), device)
    full = None
    if not sizes.all():
        full = to_device(torch.from_numpy(np.flatnonzero(sizes == 0)), device)
    return SupportPlan(
        vocabulary=vocabulary,
        ids=ids,
        offsets=offsets,
        token=entry_tokens(offsets, len(ids)),
        chunks=_chunks(kept_ids, host_offsets, vocabulary, d, device),
        full=full,
    )


def _chunks(
    kept_ids: Tensor,
    host_offsets: NDArray[np.integer],
    vocabulary: int,
    d: int,
    device: torch.device,
) -> tuple[Chunk, ...]:
    """Neighbouring gather chunks become one: fewer launches."""
    tokens = len(host_offsets) - 1
    chunks: list[Chunk] = []
    gathered = 0
    for first in range(0, tokens, CHUNK_TOKENS):
        last = min(first + CHUNK_TOKENS, tokens)
        span = (int(host_offsets[first]), int(host_offsets[last]))
        union = _union(kept_ids, (first, last), span, vocabulary, d)
        if union is None:
            continue
        if gathered < first:
            chunks.append(
                Chunk((gathered, first), (int(host_offsets[gathered]), int(host_offsets[first])))
            )
        members, column = (to_device(part, device) for part in union)
        chunks.append(Chunk((first, last), span, members, column))
        gathered = last
    if gathered < tokens:
        span = (int(host_offsets[gathered]), int(host_offsets[tokens]))
        chunks.append(Chunk((gathered, tokens), span))
    return tuple(chunks)


def _union(
    kept_ids: Tensor, tokens: tuple[int, int], span: tuple[int, int], vocabulary: int, d: int
) -> tuple[Tensor, Tensor] | None:
    """The union of these tokens' masks and each entry's place in it, where that is cheaper."""
    count, entries = tokens[1] - tokens[0], span[1] - span[0]
    # Even where all sets are equal, the union is as large as their mean.
    if entries < UNION_FLOOR * count or not union_is_cheaper(entries, count, entries // count, d):
        return None
    ids = kept_ids[span[0] : span[1]].long()
    kept = torch.zeros(vocabulary, dtype=torch.bool, device=ids.device)
    kept[ids] = True
    members = kept.nonzero().squeeze(1)
    if not union_is_cheaper(entries, count, len(members), d):
        return None
    padded = torch.nn.functional.pad(members, (0, -len(members) % ALIGNMENT))
    return padded, (kept.cumsum(0) - 1)[ids]
