"""What is packed: trajectories or parts of them, balanced over ranks by tokens."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from keel.rl.types import Segment


@dataclass(frozen=True, slots=True)
class Work:
    """A trajectory, or a part of one, and what the loss needs to know about it."""

    segments: tuple[Segment, ...]
    sampled_tokens: int
    """|o_i|, of the whole trajectory."""
    advantage: float
    kl_coef: float
    weight: float
    split: int = -1
    """As in `MicroBatch.split_S`."""

    @property
    def tokens(self) -> int:
        return sum(len(segment.token_ids_T) for segment in self.segments)


def split_long(groups: Sequence[Sequence[Work]], capacity: int) -> tuple[list[list[Work]], int]:
    """Groups whose trajectories that do not fit `capacity` are cut into their segments, and how
    many such there are."""
    cut: list[list[Work]] = []
    count = 0
    for group in groups:
        parts: list[Work] = []
        for item in group:
            if item.tokens > capacity:
                taught = tuple(one for one in item.segments if one.trainable_T.any())
                item = replace(item, segments=taught)
            if item.tokens <= capacity or len(item.segments) == 1:
                parts.append(item)
            else:
                parts += (replace(item, segments=(one,), split=count) for one in item.segments)
                count += 1
        cut.append(parts)
    return cut, count


def balance(
    tokens: Sequence[int], *, ranks: int, capacity: int, sizes: Sequence[int] | None = None
) -> list[list[list[int]]]:
    """Indices of `tokens` as [rank][micro-batch][item], equally many micro-batches a rank.

    Most tokens first into the emptiest bin, with the fewest bins (a multiple of `ranks`) for which
    that fits `capacity`; a larger item sits alone. Bins of similar size then run at the same time
    on all ranks, dealt back and forth so that the sums match too. `sizes`: what has to fit, where
    that is not the tokens.
    """
    sizes = tokens if sizes is None else sizes
    order = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))
    whole = sum(min(size, capacity) for size in sizes)
    alone = sum(2 * size > capacity for size in sizes)  # no two of them in a bin
    rows = max(1, -(-whole // (ranks * capacity)), -(-alone // ranks))
    while (bins := _fill(tokens, sizes, order, rows * ranks, capacity)) is None:
        rows += 1
    bins.sort(key=lambda chosen: (-sum(tokens[i] for i in chosen), chosen))
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    for row in range(rows):
        across = bins[row * ranks : (row + 1) * ranks]
        for rank, chosen in enumerate(across if row % 2 == 0 else reversed(across)):
            dealt[rank].append(sorted(chosen))
    return dealt


def _fill(
    tokens: Sequence[int],
    sizes: Sequence[int],
    order: Iterable[int],
    count: int,
    capacity: int,
) -> list[list[int]] | None:
    """`count` bins, or None where the emptiest cannot take the next item."""
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
