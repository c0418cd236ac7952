"""What a group's trajectories begin with alike is packed once: a prompt with eight answers costs
the network one prompt.

A token's place in the network depends on the tokens before it alone. Trajectories that begin with
the same tokens, sent to the same experts, therefore have the same keys and values there in every
layer, and the gradient of what they share is the sum of theirs. So the common beginning becomes a
segment of its own, which trains nothing, and each trajectory's rest one that follows it
(`MicroBatch.follows`). The last token before the first sampled one stays with the rest: what it
predicts is a trajectory's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.rl.packing.work import Work, balance
from keel.rl.types import Segment

LEAST = 16
"""Tokens that are worth a segment of their own."""
SIZES = (1.0, 0.5, 0.25, 0.125)
"""Of a micro-batch's tokens, or of a rank's, how much trajectories that share a beginning may fill
together: less balances better over ranks, and has the beginning more often."""
STARTED = 1 / 16
"""Of a micro-batch's tokens: what one costs beside them."""
KEPT = 0.75
"""Of what a cluster has in common, and of what a trajectory could share, when that joins it."""
COPIES = 4
"""As much memory as the keys and values of so many tokens take, with what their gradients take,
training keeps of one token: 6 to 20 without the latter (docs/scaling.md), and 4 to 5 of a narrow
model whose activations are computed again."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Work that stays together in a micro-batch."""

    work: tuple[Work, ...]
    shared: int = 0
    """Tokens that all of it begins with, and that are packed once. Where there are any, each has
    one segment."""

    @property
    def tokens(self) -> int:
        """That are packed."""
        return self.shared + sum(item.tokens - self.shared for item in self.work)

    @property
    def size(self) -> int:
        """In tokens: what each context has a copy of, keys and values, counts too."""
        return self.tokens + len(self.work) * self.shared // COPIES


def singly(work: Sequence[Work]) -> list[Bundle]:
    """Each by itself."""
    return [Bundle((item,)) for item in work]


def bundled(groups: Sequence[Sequence[Work]], *, ranks: int, capacity: int) -> list[Bundle]:
    """The work of all groups, as it takes the slowest rank the least time: in bundles that share
    what they begin with, none of several larger than `capacity`, or singly. Same groups, same
    bundles."""
    apart = singly([item for group in groups for item in group])
    alike = [cluster for group in groups for cluster in _clusters(group)]
    if not any(cluster.shared for cluster in alike):
        return apart
    each = sum(bundle.tokens for bundle in apart) // ranks
    limits = {min(capacity, int(size * whole)) for whole in (capacity, each) for size in SIZES}
    choices = [apart]
    for limit in sorted(limits):
        choices.append([bundle for cluster in alike for bundle in _cut(cluster, limit)])
    return min(choices, key=lambda bundles: _time(bundles, ranks, capacity))


def dealt(bundles: Sequence[Bundle], *, ranks: int, capacity: int) -> list[list[list[int]]]:
    """Their indices, as `balance` has them: what fits a micro-batch is a matter of memory, and how
    long a rank takes one of tokens."""
    sizes = [bundle.size for bundle in bundles]
    tokens = [bundle.tokens for bundle in bundles]
    return balance(tokens, ranks=ranks, capacity=capacity, sizes=sizes)


@lru_cache(maxsize=4096)  # a plan tries thousands of layouts
def at_the_limits(
    groups: int, size: int, *, shared: int, own: int, ranks: int, capacity: int
) -> tuple[int, int]:
    """Micro-batches of a rank, and tokens of the busiest, of so many groups of `size` trajectories:
    `shared` tokens that those of a group begin with and that are packed once (0: none), and `own`
    more of each. As `bundled` and `dealt` have it, by arithmetic: exactly where bundles are many
    beside ranks, or alike."""
    each = groups * size * (shared + own) // ranks
    limits = {min(capacity, int(part * whole)) for whole in (capacity, each) for part in SIZES}
    room = own + shared // COPIES + 1
    together = {max(1, min(size, (limit - shared) // room)) for limit in limits if shared} | {1}

    def filled(count: int) -> tuple[float, int, int]:
        """In bundles of `count`, and of what is left over in each group; first, how long that
        takes (`_time`)."""
        rows = free = idle = slowest = 0
        for items, bundles in ((count, groups * (size // count)), (size % count, groups)):
            if items:
                packed = shared + items * own
                each_rank = -(-max(0, bundles - idle) // ranks)  # those that have nothing first
                idle += each_rank * ranks - bundles
                slowest += each_rank * packed
                per = max(1, capacity // (packed + (items * shared // COPIES) * (items > 1)))
                more = -(-max(0, bundles - free) // (per * ranks))
                rows, free = rows + more, free + more * per * ranks - bundles
        return slowest + STARTED * capacity * rows, rows, slowest

    _, rows, slowest = min(map(filled, together))
    return rows, slowest


def _time(bundles: Sequence[Bundle], ranks: int, capacity: int) -> float:
    """Of a step, in tokens: in each round the rank with the most keeps the others waiting."""
    tokens = [bundle.tokens for bundle in bundles]
    plan = dealt(bundles, ranks=ranks, capacity=capacity)
    filled = [[sum(tokens[i] for i in chosen) for chosen in bins] for bins in plan]
    rounds = np.max(filled, axis=0)
    return float(rounds.sum()) + STARTED * capacity * len(rounds)


def _cut(cluster: Bundle, most: int) -> Iterator[Bundle]:
    """A cluster in bundles of a size of `most`, as far as single ones are not larger."""
    shared, together, size = cluster.shared, list[Work](), cluster.shared
    for item in cluster.work:
        own = item.tokens - shared + shared // COPIES + 1
        if together and size + own > most:
            yield _joined(together, shared)
            together, size = [], shared
        together.append(item)
        size += own
    yield _joined(together, shared)


def bundle_size(count: int, shared: int, whole: int) -> int:
    """What a bundle of so many trajectories of `whole` tokens fills, of which they share the first
    `shared`."""
    return shared + count * (whole - shared + shared // COPIES + 1)


def _joined(work: Sequence[Work], shared: int) -> Bundle:
    return Bundle(tuple(work), shared if len(work) > 1 else 0)


def _clusters(group: Sequence[Work]) -> list[Bundle]:
    """Trajectories of a group that begin alike, however large; each of the others by itself."""
    found: list[Bundle] = []
    for item in group:
        place, most = _home(found, item)
        if place is None:
            found.append(Bundle((item,), most))
        else:
            found[place] = Bundle((*found[place].work, item), most)
    return [_joined(cluster.work, cluster.shared) for cluster in found]


def _home(clusters: Sequence[Bundle], item: Work) -> tuple[int | None, int]:
    """Which of the clusters it joins, and what all of that have in common then: one where both lose
    little by it, since a single trajectory that went another way must not keep all others apart. Of
    none: what it could share."""
    segment, *others = item.segments
    if others or item.split >= 0:  # parts of it are elsewhere
        return None, 0
    own = int(segment.trainable_T.argmax()) - 1
    for place, cluster in enumerate(clusters):
        least, most = max(LEAST, int(KEPT * max(own, cluster.shared))), min(own, cluster.shared)
        common = _alike(cluster.work[0].segments[0], segment, most) if most >= least else 0
        if common >= least:
            return place, common
    return None, own if own >= LEAST else 0


def _alike(one: Segment, other: Segment, most: int) -> int:
    """Tokens, of the first `most`, that are the same and were sent to the same experts."""
    if one.selected_TLk is not None or other.selected_TLk is not None:
        return 0
    most = _agreeing(one.token_ids_T[:most], other.token_ids_T[:most])
    if one.routes_TLK is not None and other.routes_TLK is not None:
        most = _agreeing(one.routes_TLK[:most], other.routes_TLK[:most])
    return most


def _agreeing(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Leading rows that are equal."""
    differ = (one != other).any(axis=tuple(range(1, one.ndim)))
    return int(differ.argmax()) if differ.any() else len(differ)
