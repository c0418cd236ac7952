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
COPIES = 6
"""As much memory as the keys and values of so many tokens takes what training keeps of one token: 6
to 20 of models whose keys are not as wide as the rest of a layer (docs/scaling.md)."""


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
    beginnings = [_beginning(group) for group in groups]
    if not any(beginnings):
        return apart
    each = sum(bundle.size for bundle in apart) // ranks
    limits = {min(capacity, int(size * whole)) for whole in (capacity, each) for size in SIZES}
    choices = [apart]
    for limit in sorted(limits):
        cut = [_cut(group, shared, limit) for group, shared in zip(groups, beginnings, strict=True)]
        choices.append([bundle for bundles in cut for bundle in bundles])
    return min(choices, key=lambda bundles: _time(bundles, ranks, capacity))


def _time(bundles: Sequence[Bundle], ranks: int, capacity: int) -> float:
    """Of a step, in tokens: in each round the rank with the most keeps the others waiting."""
    sizes = [bundle.size for bundle in bundles]
    dealt = balance(sizes, ranks=ranks, capacity=capacity)
    filled = [[sum(sizes[i] for i in chosen) for chosen in bins] for bins in dealt]
    rounds = np.max(filled, axis=0)
    return float(rounds.sum()) + STARTED * capacity * len(rounds)


def _cut(group: Sequence[Work], shared: int, most: int) -> Iterator[Bundle]:
    """A group's work in bundles of a size of `most`, as far as single ones are not larger."""
    together: list[Work] = []
    tokens = shared
    for item in group:
        if not shared or not _may_share(item):
            yield Bundle((item,))
            continue
        own = item.tokens - shared + shared // COPIES + 1
        if together and tokens + own > most:
            yield _joined(together, shared)
            together, tokens = [], shared
        together.append(item)
        tokens += own
    if together:
        yield _joined(together, shared)


def _joined(work: Sequence[Work], shared: int) -> Bundle:
    return Bundle(tuple(work), shared if len(work) > 1 else 0)


def _may_share(item: Work) -> bool:
    """A trajectory of one context: none of its tokens is anywhere else."""
    return len(item.segments) == 1 and item.split < 0


def _beginning(group: Sequence[Work]) -> int:
    """Tokens that all of a group's trajectories that may share begin with; 0 if that is too few."""
    segments = [item.segments[0] for item in group if _may_share(item)]
    if len(segments) < 2:
        return 0
    first = segments[0]
    common = min(int(segment.trainable_T.argmax()) - 1 for segment in segments)
    for segment in segments[1:]:
        common = _alike(first, segment, common)
    return common if common >= LEAST else 0


def _alike(one: Segment, other: Segment, most: int) -> int:
    """Tokens, of the first `most`, that are the same and were sent to the same experts."""
    if most <= 0 or one.selected_TLk is not None or other.selected_TLk is not None:
        return 0
    most = _agreeing(one.token_ids_T[:most], other.token_ids_T[:most])
    if one.routes_TLK is not None and other.routes_TLK is not None:
        most = _agreeing(one.routes_TLK[:most], other.routes_TLK[:most])
    return most


def _agreeing(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Leading rows that are equal."""
    differ = (one != other).any(axis=tuple(range(1, one.ndim)))
    return int(differ.argmax()) if differ.any() else len(differ)
