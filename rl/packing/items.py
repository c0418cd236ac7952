"""The units of packing, which are whole trajectories or parts of them, and their distribution over
ranks."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from keel.rl.types import Segment


@dataclass(frozen=True, slots=True)
class PackItem:
    """A trajectory or a part of one, with the values that its loss needs."""

    segments: tuple[Segment, ...]
    sampled_tokens: int
    """The number of sampled tokens |o_i| in the whole trajectory."""
    advantage: float
    kl_coef: float
    weight: float
    split: int = -1
    """See `MicroBatch.split_S`."""
    reference: int = 0
    """See `MicroBatch.reference_S`."""

    @property
    def tokens(self) -> int:
        return sum(len(segment.token_ids_T) for segment in self.segments)


def split_long(
    groups: Sequence[Sequence[PackItem]], capacity: int
) -> tuple[list[list[PackItem]], int]:
    """Split trajectories that are longer than `capacity` into their segments. Returns the groups
    and the number of trajectories that were split."""
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
    """Assign items to micro-batches so that all ranks take about the same time. Returns indices
    into `tokens` as [rank][micro-batch][item]. The longest items are placed first, each into the
    emptiest micro-batch. The number of micro-batches is the smallest multiple of `ranks` for which
    no micro-batch exceeds `capacity`. An item larger than `capacity` gets a separate micro-batch.
    Micro-batches of similar size run at the same time on all ranks, and the order of the ranks
    alternates so that their totals are similar too.

    `capacity` limits the sum of `sizes` in a micro-batch; by default, `sizes` is `tokens`.
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
