"""Trajectories, or parts of them, balanced over ranks by tokens."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from keel.rl.types import Segment


@dataclass(frozen=True, slots=True)
class PackItem:
    """A trajectory, or a part of one, with its terms in the loss."""

    segments: tuple[Segment, ...]
    sampled_tokens: int
    """|o_i|, of the whole trajectory."""
    advantage: float
    kl_coef: float
    weight: float
    split: int = -1
    """See `MicroBatch.split_S`."""

    @property
    def tokens(self) -> int:
        return sum(len(segment.token_ids_T) for segment in self.segments)


def split_long(
    groups: Sequence[Sequence[PackItem]], capacity: int
) -> tuple[list[list[PackItem]], int]:
    """Cut trajectories that exceed `capacity` into their segments.

    Returns the groups and the number of trajectories that were cut.
    """
    result: list[list[PackItem]] = []
    count = 0
    for group in groups:
        parts: list[PackItem] = []
        for item in group:
            if item.tokens > capacity:
                trained = tuple(one for one in item.segments if one.trainable_T.any())
                item = replace(item, segments=trained)
            if item.tokens <= capacity or len(item.segments) == 1:
                parts.append(item)
            else:
                parts += (replace(item, segments=(one,), split=count) for one in item.segments)
                count += 1
        result.append(parts)
    return result, count


def balance(
    tokens: Sequence[int], *, ranks: int, capacity: int, sizes: Sequence[int] | None = None
) -> list[list[list[int]]]:
    """Assign items to micro-batches: indices of `tokens` as [rank][micro-batch][item].

    Places the longest items first, each into the emptiest bin, with the fewest bins (a multiple of
    `ranks`) that keep every bin within `capacity`; a larger item gets a bin alone. Bins of similar
    size run at the same time on all ranks, in alternating rank order so that the totals match too.

    sizes: what `capacity` limits, if not `tokens`.
    """
    sizes = tokens if sizes is None else sizes
    order = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))
    total = sum(min(size, capacity) for size in sizes)
    alone = sum(2 * size > capacity for size in sizes)  # no two of them share a bin
    rows = max(1, -(-total // (ranks * capacity)), -(-alone // ranks))
    while (bins := _fill(tokens, sizes, order, rows * ranks, capacity)) is None:
        rows += 1
    bins.sort(key=lambda members: (-sum(tokens[i] for i in members), members))
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    for row in range(rows):
        across = bins[row * ranks : (row + 1) * ranks]
        for rank, members in enumerate(across if row % 2 == 0 else reversed(across)):
            plan[rank].append(sorted(members))
    return plan


def _fill(
    tokens: Sequence[int],
    sizes: Sequence[int],
    order: Iterable[int],
    count: int,
    capacity: int,
) -> list[list[int]] | None:
    """Fill `count` bins, or return None if the emptiest cannot take the next item."""
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    loads = [(0, index) for index in range(count)]
    for item in order:
        load, index = loads[0]
        if filled[index] and filled[index] + sizes[item] > capacity:
            return None
        bins[index].append(item)
        filled[index] += sizes[item]
        heapq.heapreplace(loads, (load + tokens[item], index))
    return bins
