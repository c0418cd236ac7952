"""Pack scored trajectories into micro-batches so that all ranks process about the same number of
tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from keel.rl.packing.batch import Loss, MicroBatch, TrainBatch
from keel.rl.packing.prefix_sharing import (
    PackItem,
    PrefixGroup,
    assign,
    group_individually,
    share_prefixes,
    split_long,
)
from keel.rl.types import NO_ROUTE, Recordings, SamplingMasks, ScoredGroup, Segment

T = TypeVar("T", bound=np.generic)


def pack(groups: Sequence[ScoredGroup], **options: Any) -> list[TrainBatch]:
    """Pack the groups of one optimizer step into one `TrainBatch` per rank. See `plan_packing`."""
    return [plan.pack() for plan in plan_packing(groups, **options)]


def plan_packing(
    groups: Sequence[ScoredGroup],
    *,
    ranks: int,
    micro_batch_tokens: int,
    skip_uniform_groups: bool = False,
    sequence_mask: bool = True,
    share_prompts: bool = False,
    watched: Sequence[Segment] = (),
    references: Mapping[str, int] | None = None,
) -> list[PackPlan]:
    """Divide the groups of one optimizer step among the ranks. A micro-batch holds at most
    `micro_batch_tokens` tokens. A longer segment gets its own micro-batch. All ranks have the same
    number of micro-batches, so that their collectives match. Ranks with too few are given extra
    micro-batches that contain a single untrained token. The same `groups` always give the same
    result.

    A trajectory that fits into a micro-batch is never split, because the sequence mask needs all of
    it. The segments of a longer trajectory may go to any rank, and those without sampled tokens are
    omitted. With `sequence_mask` (used if `algorithm.mask_delta` is set), the segments of split
    trajectories with a negative advantage are also added to `scored_first`.

    All groups have the same weight, regardless of how many trajectories they lost (Eq. 5). With B
    trajectories in n non-empty groups, a trajectory in a group of size G_i has the weight B / (n
    G_i) in a loss that divides by B. This is exactly 1 if all groups have the same size. The mean
    that is subtracted from a reward includes the reward itself, so a smaller group has smaller
    advantages, by a factor of 1 − 1/G_i on average. For a group with a single trajectory, only the
    KL term remains.

    `skip_uniform_groups` omits groups whose advantages and KL coefficient are all 0. They still
    count in `total_sequences` and n, so the gradient of the loss stays the same. Auxiliary
    objectives (sparse attention indexers and `kept_mass_coef`) ignore these groups.

    `share_prompts` packs the common prefix of a group once (`keel.rl.packing.prefix_sharing`)
    wherever that makes the step faster.

    `references` gives `MicroBatch.reference_S` for each domain.

    `watched` lists segments to identify in `MicroBatch.watched`; segments that are not packed are
    ignored. If only some segments have sampling masks, the others are treated as sampled without
    truncation. Raises `ValueError` if there is no trajectory, if `ranks` or `micro_batch_tokens` is
    below 1, or if recorded routes are missing or differ in shape.
    """
    for name, value in (("ranks", ranks), ("micro_batch_tokens", micro_batch_tokens)):
        if value < 1:
            raise ValueError(f"{name} = {value}: must be at least 1")
    total_sequences = sum(len(group.group.trajectories) for group in groups)
    if total_sequences == 0:
        raise ValueError(f"none of the {len(groups)} groups has a trajectory to learn from")
    sampled = sum(bool(group.group.trajectories) for group in groups)
    batch_format = BatchFormat.of(groups)
    items, split = split_long(
        [
            [
                PackItem(
                    trajectory.segments,
                    trajectory.sampled_tokens,
                    float(advantage),
                    group.group.prompt.kl_coef,
                    weight=total_sequences / (sampled * len(group.group.trajectories)),
                    reference=(references or {}).get(group.group.prompt.domain, 0),
                )
                for trajectory, advantage in zip(
                    group.group.trajectories, group.advantages_G, strict=True
                )
            ]
            for group in groups
            if not (skip_uniform_groups and group.idle)
        ],
        micro_batch_tokens,
    )
    flat = [item for members in items for item in members]
    prefix_groups = group_individually(flat)
    if share_prompts:
        prefix_groups = share_prefixes(items, ranks=ranks, capacity=micro_batch_tokens)
    trained = _divide(prefix_groups, ranks=ranks, capacity=micro_batch_tokens)
    scored: list[_Share] = [()] * ranks
    maskable = [item for item in flat if item.split >= 0 and item.advantage < 0]
    if sequence_mask and maskable:
        scored = _divide(group_individually(maskable), ranks=ranks, capacity=micro_batch_tokens)
    numbers = {id(segment): number for number, segment in enumerate(watched)}
    return [
        PackPlan(
            micro_batches=share,
            scored_first=first,
            batch_format=batch_format,
            watched=tuple(
                (numbers[id(s)], s) for s in _segments(chain(*share)) if id(s) in numbers
            ),
            totals={
                "total_sequences": total_sequences,
                "total_tokens": sum(group.tokens for group in prefix_groups),
                "split_sequences": split,
                "signal": any(g.group.trajectories and not g.idle for g in groups),
            },
        )
        for share, first in zip(trained, scored, strict=True)
    ]


_FEW_TOKENS = 2**20
_Share = tuple[tuple[PrefixGroup, ...], ...]
"""The contents of the micro-batches of one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """One rank's share of an optimizer step. The rank packs it itself, so that recordings do not
    pass through the driver."""

    micro_batches: _Share
    scored_first: _Share
    batch_format: BatchFormat
    watched: tuple[tuple[int, Segment], ...]
    """The watched segments among them and their indices in `watched`."""
    totals: Mapping[str, Any]
    """The fields of `TrainBatch` that are the same on all ranks."""

    @property
    def keys(self) -> set[Any]:
        """Keys of the stored recordings that `pack` needs."""
        parts = chain(*self.micro_batches, *self.scored_first)
        return {key for segment in _segments(parts) for key in segment.keys}

    @property
    def small(self) -> bool:
        """True if the plan has only a few tokens and no stored recordings."""
        return not self.keys and self.totals["total_tokens"] < _FEW_TOKENS

    def pack(self, recordings: Mapping[Any, Recordings] = MappingProxyType({})) -> TrainBatch:
        """Build the micro-batches. `recordings` maps `keys` to the stored recordings."""
        numbers = {id(segment): number for number, segment in self.watched}
        trained, scored = (
            tuple(_join(members, self.batch_format, recordings, numbers) for members in share)
            for share in (self.micro_batches, self.scored_first)
        )
        return TrainBatch(micro_batches=trained, scored_first=scored, **self.totals)


def _segments(groups: Iterable[PrefixGroup]) -> Iterator[Segment]:
    return (segment for group in groups for item in group.items for segment in item.segments)


@dataclass(frozen=True, slots=True)
class BatchFormat:
    """The optional fields that the micro-batches of a step have. They are the same in all
    micro-batches, so that every rank runs the same code."""

    routes: tuple[int, int] | None  # (L, K) of the recorded routes, or None without routes
    sampling_mask: bool
    selected: tuple[int, int] | None = None
    """(L, b) of the recorded sparse attention selections, or None without them."""
    loss: Loss = "grpo"

    @staticmethod
    def of(groups: Sequence[ScoredGroup]) -> BatchFormat:
        segments = [
            segment
            for group in groups
            for trajectory in group.group.trajectories
            for segment in trajectory.segments
        ]
        routes = next((s.routes_shape for s in segments if s.routes_shape is not None), None)
        for segment in segments:
            if (shape := segment.routes_shape) != routes:
                raise ValueError(
                    f"segment of {segment.prompt_id}: routes_TLK has (L, K) = {shape}, but another "
                    f"segment of the batch has {routes}. Record routes for all or for none"
                )
        shapes = [s.selected_shape for s in segments if s.selected_shape is not None]
        return BatchFormat(
            routes=None if routes is None else (routes[0], routes[1]),
            sampling_mask=any(segment.mask_sizes_T is not None for segment in segments),
            selected=(shapes[0][0], max(width for _, width in shapes)) if shapes else None,
        )


def assemble(
    groups: Sequence[PrefixGroup], batch_format: BatchFormat, *, ranks: int, capacity: int
) -> list[tuple[MicroBatch, ...]]:
    """Build each rank's micro-batches."""
    shares = _divide(groups, ranks=ranks, capacity=capacity)
    return [tuple(_join(members, batch_format) for members in share) for share in shares]


def _divide(groups: Sequence[PrefixGroup], *, ranks: int, capacity: int) -> list[_Share]:
    plan = assign(groups, ranks=ranks, capacity=capacity)
    return [tuple(tuple(groups[i] for i in members) for members in bins) for bins in plan]


class _Span(NamedTuple):
    segment: Segment
    start: int
    stop: int
    sequence: int
    follows: int = -1


def _spans(groups: Sequence[PrefixGroup]) -> tuple[list[_Span], list[PackItem]]:
    spans: list[_Span] = []
    items: list[PackItem] = []
    for group in groups:
        prefix = -1
        if group.shared:
            prefix = len(spans)
            spans.append(_Span(group.items[0].segments[0], 0, group.shared, len(items)))
        for item in group.items:
            # Parts of a trajectory are adjacent and count as one sequence.
            if not (items and item.split >= 0 and item.split == items[-1].split):
                items.append(item)
            for segment in item.segments:
                stop = len(segment.token_ids_T)
                spans.append(_Span(segment, group.shared, stop, len(items) - 1, prefix))
    return spans or [_Span(_PADDING, 0, 1, 0)], items


def _join(
    groups: Sequence[PrefixGroup],
    batch_format: BatchFormat,
    recordings: Mapping[Any, Recordings] = MappingProxyType({}),
    numbers: Mapping[int, int] = MappingProxyType({}),
) -> MicroBatch:
    """Build a micro-batch. `numbers` maps the `id()` of each watched segment to its index in
    `watched`."""
    spans, items = _spans(groups)
    lengths = [span.stop - span.start for span in spans]
    owners = [(items or [_PADDING_ITEM])[span.sequence] for span in spans]
    watched = [
        # A shared prefix is not the watched segment.
        numbers.get(id(span.segment), -1) if span.stop == len(span.segment.token_ids_T) else -1
        for span in spans
    ]
    spans = [span._replace(segment=span.segment.loaded(recordings)) for span in spans]

    def joined(per_token: Callable[[Segment], NDArray[T]]) -> NDArray[T]:
        return np.concatenate([per_token(one.segment)[one.start : one.stop] for one in spans])

    def spread(values: Sequence[float], kind: type[T]) -> NDArray[T]:
        return np.repeat(np.asarray(values, kind), lengths)

    routes, masks, selected = None, None, None
    if batch_format.routes is not None:
        shape = batch_format.routes
        routes = joined(lambda segment: _routes(segment, shape))
    if batch_format.sampling_mask:
        masks = SamplingMasks.concat(
            [_sampling_masks(span.segment).slice(span.start, span.stop) for span in spans]
        )
    if batch_format.selected is not None:
        layers, width = batch_format.selected
        selected = joined(lambda segment: segment.selection(layers, width))
    return MicroBatch(
        token_ids_N=joined(lambda segment: segment.token_ids_T),
        position_N=np.concatenate([np.arange(s.start, s.stop, dtype=np.int32) for s in spans]),
        segment_N=spread(range(len(spans)), np.int32),
        sequence_N=spread([span.sequence for span in spans], np.int64),
        trainable_N=joined(lambda segment: segment.trainable_T),
        logp_old_N=joined(lambda segment: segment.logp_old_T),
        advantage_N=spread([owner.advantage for owner in owners], np.float32),
        kl_coef_N=spread([owner.kl_coef for owner in owners], np.float32),
        sequence_tokens_S=np.asarray([item.sampled_tokens for item in items], np.int64),
        sequence_weight_S=np.asarray([item.weight for item in items], np.float32),
        routes_NLK=routes,
        sampling_mask=masks,
        selected_NLb=selected,
        reference_S=np.asarray([item.reference for item in items], np.int64)
        if any(item.reference for item in items)
        else None,
        split_S=np.asarray([item.split for item in items], np.int64)
        if any(item.split >= 0 for item in items)
        else None,
        follows=np.asarray([span.follows for span in spans], np.int64)
        if any(group.shared for group in groups)
        else None,
        watched=np.asarray(watched, np.int64) if max(watched) >= 0 else None,
        loss=batch_format.loss,
    )


def _routes(segment: Segment, shape: tuple[int, int]) -> NDArray[np.int16]:
    if segment.routes_TLK is None:  # only padding: `BatchFormat.of` rejects other segments
        return np.full((len(segment.token_ids_T), *shape), NO_ROUTE, np.int16)
    return segment.routes_TLK.astype(np.int16, copy=False)


def _sampling_masks(segment: Segment) -> SamplingMasks:
    return segment.sampling_mask or SamplingMasks.empty(len(segment.token_ids_T))


_PADDING = Segment(
    prompt_id="padding",
    token_ids_T=np.zeros(1, np.int32),
    trainable_T=np.zeros(1, np.bool_),
    logp_old_T=np.zeros(1, np.float32),
    version_T=np.full(1, -1, np.int32),
)
"""Segment for ranks without work: a single token that is not trained on."""
_PADDING_ITEM = PackItem((_PADDING,), 1, advantage=0.0, kl_coef=0.0, weight=1.0)
