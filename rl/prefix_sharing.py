"""Distribute trajectories over data-parallel replicas and micro-batches, and pack the common prefix
of a group only once.

If a prompt has eight completions, the network processes the prompt once instead of eight times.
Keys and values at a position depend only on the tokens before it. If trajectories start with the
same tokens and route them to the same experts, their keys and values there are the same in every
layer, and the gradient of the prefix is the sum of their gradients. The prefix becomes a segment
without trainable tokens, and the rest of each trajectory becomes a segment that follows it
(`MicroBatch.follows`). The last token before the first sampled one stays with the rest of each
trajectory, because the token it predicts differs between trajectories.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.rl.types import Segment

_MIN_PREFIX = 16  # minimum length, in tokens, of a prefix worth sharing
_SIZES = (1.0, 0.5, 0.25, 0.125)
"""Candidate size limits for groups with a shared prefix, as fractions of a micro-batch or of a
replica's tokens. Smaller groups are easier to balance across replicas but repeat the prefix more
often."""
_LAUNCH_COST = 1 / 16  # fixed cost of running a micro-batch, as a fraction of its token capacity
_MIN_OVERLAP = 0.75
"""A trajectory joins a cluster only if both keep at least this fraction of their longest possible
prefix."""
_KV_COPIES_PER_TOKEN = 4
"""Number of copies of a token's keys and values, with gradients, that take as much memory as the
activations of one token. Measured values are 6 to 20 without gradients (docs/scaling.md), and 4 to
5 for a narrow model with recomputed activations."""


@dataclass(frozen=True, slots=True)
class PackItem:
    """A trajectory or part of one, along with the values its loss needs."""

    segments: tuple[Segment, ...]
    sampled_tokens: int  # number of sampled tokens |o_i| in the whole trajectory
    advantage: float
    kl_coef: float
    weight: float
    split: int = -1  # see `MicroBatch.split_S`
    reference: int = 0  # see `MicroBatch.reference_S`

    @property
    def tokens(self) -> int:
        return sum(len(segment.token_ids_T) for segment in self.segments)


def split_long(
    groups: Sequence[Sequence[PackItem]], capacity: int
) -> tuple[list[list[PackItem]], int]:
    """Split trajectories longer than `capacity` into their segments. Returns the new groups and how
    many trajectories were split."""
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


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Items packed into the same micro-batch, with a common prefix that is packed only once."""

    items: tuple[PackItem, ...]
    shared: int = 0
    """Length of the common prefix that is packed once for all items. If it is positive, each item
    has exactly one segment."""

    @property
    def tokens(self) -> int:
        """Number of tokens after packing."""
        return self.shared + sum(item.tokens - self.shared for item in self.items)

    @property
    def size(self) -> int:
        """Memory that the group needs, measured in tokens. Includes a copy of the prefix's keys and
        values for each item."""
        return self.tokens + len(self.items) * self.shared // _KV_COPIES_PER_TOKEN


def prefix_group_size(count: int, shared: int, whole: int) -> int:
    """Return an upper bound on `PrefixGroup.size` for `count` items of `whole` tokens each."""
    return shared + count * (whole - shared + shared // _KV_COPIES_PER_TOKEN + 1)


def arrange(
    groups: Sequence[Sequence[PackItem]],
    *,
    replicas: int,
    capacity: int,
    share_prompts: bool = False,
) -> list[tuple[tuple[PrefixGroup, ...], ...]]:
    """Assign the items of completion groups to micro-batches of at most `capacity` tokens. Returns
    the micro-batches of each data-parallel replica, each as a tuple of prefix groups. With
    `share_prompts`, common prefixes are packed once if that is faster."""
    members = [PrefixGroup((item,)) for group in groups for item in group]
    if share_prompts:
        members = _share_prefixes(groups, members, replicas, capacity)
    plan = _balance(members, replicas, capacity)
    return [tuple(tuple(members[i] for i in one) for one in bins) for bins in plan]


def _share_prefixes(
    groups: Sequence[Sequence[PackItem]], apart: list[PrefixGroup], replicas: int, capacity: int
) -> list[PrefixGroup]:
    """Choose the prefix groups that minimize the slowest replica's time. `apart` has one group for
    each item, without a shared prefix. Only single-item groups can exceed `capacity`. The result is
    deterministic."""
    clusters = [cluster for group in groups for cluster in _cluster_by_prefix(group)]
    if not any(cluster.shared for cluster in clusters):
        return apart
    per_replica = sum(one.tokens for one in apart) // replicas
    limits = {
        min(capacity, int(size * whole)) for whole in (capacity, per_replica) for size in _SIZES
    }
    choices = [apart]
    for limit in sorted(limits):
        choices.append([part for cluster in clusters for part in _split_cluster(cluster, limit)])

    def step_time(choice: Sequence[PrefixGroup]) -> float:
        """Estimate the time of a step, measured in tokens. Each round of micro-batches takes as
        long as its busiest replica."""
        tokens = [group.tokens for group in choice]
        plan = _balance(choice, replicas, capacity)
        filled = [[sum(tokens[i] for i in members) for members in bins] for bins in plan]
        rounds = np.max(filled, axis=0)
        return float(rounds.sum()) + _LAUNCH_COST * capacity * len(rounds)

    return min(choices, key=step_time)


def _balance(groups: Sequence[PrefixGroup], replicas: int, capacity: int) -> list[list[list[int]]]:
    """Assign groups to micro-batches so that all replicas take about the same time. Returns indices
    into `groups` as [replica][micro-batch][group]. The sum of sizes (memory) in a micro-batch is at
    most `capacity`, unless a single group is larger than that.

    The groups with the most tokens (time) are placed first, each into the micro-batch with the
    fewest tokens. The number of micro-batches is the smallest multiple of `replicas` that holds all
    groups. Micro-batches of similar size run at the same time on all replicas, in alternating order
    so that the totals per replica also come out similar.
    """
    sizes, tokens = [group.size for group in groups], [group.tokens for group in groups]
    order = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))
    total = sum(min(size, capacity) for size in sizes)
    alone = sum(2 * size > capacity for size in sizes)  # no two of them share a bin
    rows = max(1, -(-total // (replicas * capacity)), -(-alone // replicas))
    while (bins := _fill_bins(tokens, sizes, order, rows * replicas, capacity)) is None:
        rows += 1
    bins.sort(key=lambda members: (-sum(tokens[i] for i in members), members))
    plan: list[list[list[int]]] = [[] for _ in range(replicas)]
    for row in range(rows):
        across = bins[row * replicas : (row + 1) * replicas]
        for replica, members in enumerate(across if row % 2 == 0 else reversed(across)):
            plan[replica].append(sorted(members))
    return plan


def _fill_bins(
    tokens: Sequence[int], sizes: Sequence[int], order: Iterable[int], count: int, capacity: int
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


@lru_cache(maxsize=4096)  # a plan tries thousands of layouts
def estimate_packing(
    groups: int, size: int, *, shared: int, own: int, replicas: int, capacity: int
) -> tuple[int, int]:
    """Estimate the number of micro-batches per replica and the number of tokens on the busiest one,
    for `groups` groups of `size` trajectories. Each trajectory has `shared` prefix tokens (0
    disables sharing) and `own` other tokens. The estimate follows `arrange` without building
    groups. It is exact if all prefix groups have the same size or there are many more of them than
    replicas."""
    per_replica = groups * size * (shared + own) // replicas
    limits = {
        min(capacity, int(part * whole)) for whole in (capacity, per_replica) for part in _SIZES
    }
    room = own + shared // _KV_COPIES_PER_TOKEN + 1
    counts = {max(1, min(size, (limit - shared) // room)) for limit in limits if shared} | {1}

    def estimate_layout(count: int) -> tuple[float, int, int]:
        """Estimate the step time in tokens, the number of micro-batches per replica and the
        number of tokens on the busiest one, with up to `count` items per prefix group."""
        rows = free = idle = slowest = 0
        for items, parts in ((count, groups * (size // count)), (size % count, groups)):
            if items:
                packed = shared + items * own
                each = -(-max(0, parts - idle) // replicas)  # idle replicas come first
                idle += each * replicas - parts
                slowest += each * packed
                copies = (items * shared // _KV_COPIES_PER_TOKEN) * (items > 1)
                per = max(1, capacity // (packed + copies))
                more = -(-max(0, parts - free) // (per * replicas))
                rows, free = rows + more, free + more * per * replicas - parts
        return slowest + _LAUNCH_COST * capacity * rows, rows, slowest

    _, rows, slowest = min(map(estimate_layout, counts))
    return rows, slowest


def _split_cluster(cluster: PrefixGroup, limit: int) -> Iterator[PrefixGroup]:
    shared, members, size = cluster.shared, list[PackItem](), cluster.shared
    for item in cluster.items:
        own = item.tokens - shared + shared // _KV_COPIES_PER_TOKEN + 1
        if members and size + own > limit:
            yield _make_group(members, shared)
            members, size = [], shared
        members.append(item)
        size += own
    yield _make_group(members, shared)


def _make_group(items: Sequence[PackItem], shared: int) -> PrefixGroup:
    return PrefixGroup(tuple(items), shared if len(items) > 1 else 0)


def _cluster_by_prefix(group: Sequence[PackItem]) -> list[PrefixGroup]:
    clusters: list[PrefixGroup] = []
    for item in group:
        place, shared = _find_cluster(clusters, item)
        if place is None:
            clusters.append(PrefixGroup((item,), shared))
        else:
            clusters[place] = PrefixGroup((*clusters[place].items, item), shared)
    return [_make_group(cluster.items, cluster.shared) for cluster in clusters]


def _find_cluster(clusters: Sequence[PrefixGroup], item: PackItem) -> tuple[int | None, int]:
    """Find a cluster that `item` can join. Returns its index (or None) and the length of the common
    prefix. This prefix must cover at least a fraction `_MIN_OVERLAP` of both prefixes, so that a
    single diverging trajectory doesn't shorten the prefix for all the others."""
    segment, *others = item.segments
    if others or item.split >= 0:  # the trajectory has other segments
        return None, 0
    own = int(segment.trainable_T.argmax()) - 1
    for place, cluster in enumerate(clusters):
        least = max(_MIN_PREFIX, int(_MIN_OVERLAP * max(own, cluster.shared)))
        most = min(own, cluster.shared)
        common = (
            _common_prefix_length(cluster.items[0].segments[0], segment, most)
            if most >= least
            else 0
        )
        if common >= least:
            return place, common
    return None, own if own >= _MIN_PREFIX else 0


def _common_prefix_length(one: Segment, other: Segment, limit: int) -> int:
    if one.selected_shape is not None or other.selected_shape is not None:
        return 0
    limit = _count_equal_rows(one.token_ids_T[:limit], other.token_ids_T[:limit])
    ours, theirs = (s.stored.prefix_hash_P if s.stored else s.routes_TLK for s in (one, other))
    if ours is not None and theirs is not None:
        limit = _count_equal_rows(ours[:limit], theirs[:limit])
    return limit


def _count_equal_rows(one: NDArray[Any], other: NDArray[Any]) -> int:
    differ = (one != other).any(axis=tuple(range(1, one.ndim)))
    return int(differ.argmax()) if differ.any() else len(differ)
