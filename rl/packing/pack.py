"""From scored trajectories to packed micro-batches, balanced over ranks by tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from keel.rl.packing.batch import Loss, MicroBatch, TrainBatch
from keel.rl.packing.prefix_sharing import Bundle, bundled, dealt, singly
from keel.rl.packing.work import Work, split_long
from keel.rl.types import NO_ROUTE, SamplingMasks, ScoredGroup, Segment

T = TypeVar("T", bound=np.generic)


def pack(
    groups: Sequence[ScoredGroup],
    *,
    ranks: int,
    micro_batch_tokens: int,
    skip_uniform_groups: bool = False,
    sequence_mask: bool = True,
    share_prompts: bool = False,
    watched: Sequence[Segment] = (),
) -> list[TrainBatch]:
    """One `TrainBatch` a rank, for one optimizer step on all of `groups`.

    A micro-batch holds at most `micro_batch_tokens` (a longer segment has one of its own) and ranks
    have equally many, so that their collectives meet; where work runs out, a micro-batch is one
    untrainable token of no sequence. Same groups, same batches.

    The segments of a trajectory stay together in one micro-batch that can hold them all, since the
    sequence mask needs them whole. Those of a longer trajectory fall where there is room, on any
    rank; with `sequence_mask` (`algorithm.mask_delta` is set) those that it may drop, for their
    negative advantage, come in `scored_first` as well. A segment of a longer trajectory without a
    sampled token has nothing to train, and is left out.

    Each group counts as much as any other, whatever it has lost (Eq. 5): a trajectory of a group of
    G_i, among B trajectories in n groups, has the weight B / (n G_i) in a loss that divides by B.
    That is exactly 1 where all groups are equally large. Groups without a trajectory do not count
    among the n: nothing is known of them. An advantage is measured from a mean that the trajectory
    is part of, so a smaller group teaches less, by 1 − 1/G_i on average; a lone survivor's is 0,
    and only its KL term is left.

    `skip_uniform_groups` leaves out groups whose advantages and KL coefficient are all 0. They
    still count in `total_sequences` and n, so the gradient is the same, but for what an objective
    beside the loss has of them (indexers of sparse attention, `kept_mass_coef`).

    `share_prompts`: what the trajectories of a group begin with alike is there once for several of
    them (`keel.rl.packing.prefix_sharing`), where that makes the step shorter.

    `watched` segments are marked with their place in it (`MicroBatch.watched`). Those that are not
    in `groups`, or left out, do no harm.

    Raises `ValueError` when there is no trajectory at all, for `ranks` or `micro_batch_tokens`
    below 1, and naming the prompt where recorded routes are missing or of another shape than the
    others: every token would silently use another router. A segment without sampling masks among
    segments with them was not truncated, and gets empty spans.
    """
    for name, value in (("ranks", ranks), ("micro_batch_tokens", micro_batch_tokens)):
        if value < 1:
            raise ValueError(f"{name} = {value}: must be at least 1")
    total_sequences = sum(len(group.group.trajectories) for group in groups)
    if total_sequences == 0:
        raise ValueError(f"groups: none of {len(groups)} has a trajectory to learn from")
    sampled = sum(bool(group.group.trajectories) for group in groups)
    layout = Layout.of(groups, watched)
    taught = [group for group in groups if not (skip_uniform_groups and group.idle)]
    work, split = split_long(
        [
            [
                Work(
                    trajectory.segments,
                    trajectory.sampled_tokens,
                    float(advantage),
                    group.group.prompt.kl_coef,
                    weight=total_sequences / (sampled * len(group.group.trajectories)),
                )
                for trajectory, advantage in zip(
                    group.group.trajectories, group.advantages_G, strict=True
                )
            ]
            for group in taught
        ],
        micro_batch_tokens,
    )
    every = [item for items in work for item in items]
    doubtful = [item for item in every if item.split >= 0 and item.advantage < 0]
    bundles = singly(every)
    if share_prompts:
        bundles = bundled(work, ranks=ranks, capacity=micro_batch_tokens)
    trained = deal(bundles, layout, ranks=ranks, capacity=micro_batch_tokens)
    scored: list[tuple[MicroBatch, ...]] = [()] * ranks
    if sequence_mask and doubtful:
        scored = deal(singly(doubtful), layout, ranks=ranks, capacity=micro_batch_tokens)
    return [
        TrainBatch(
            micro_batches=micro_batches,
            total_sequences=total_sequences,
            total_tokens=sum(bundle.tokens for bundle in bundles),
            split_sequences=split,
            scored_first=first,
            signal=any(group.group.trajectories and not group.idle for group in groups),
        )
        for micro_batches, first in zip(trained, scored, strict=True)
    ]


def deal(
    bundles: Sequence[Bundle], layout: Layout, *, ranks: int, capacity: int
) -> list[tuple[MicroBatch, ...]]:
    """Each rank's micro-batches."""
    plan = dealt(bundles, ranks=ranks, capacity=capacity)
    return [tuple(_join([bundles[i] for i in chosen], layout) for chosen in bins) for bins in plan]


@dataclass(frozen=True, slots=True)
class Layout:
    """What every micro-batch of a step carries, so that all ranks run the same code."""

    routes: tuple[int, int] | None
    """Layers and experts a token, where routes were recorded."""
    kept: bool
    selected: tuple[int, int] | None = None
    """Layers and positions a token, where any selection of sparse attention was recorded."""
    loss: Loss = "grpo"
    watched: Mapping[int, int] = field(default_factory=dict[int, int])
    """The `id` of a segment that is watched → its number."""

    @staticmethod
    def of(groups: Sequence[ScoredGroup], watched: Sequence[Segment]) -> Layout:
        segments = [
            segment
            for group in groups
            for trajectory in group.group.trajectories
            for segment in trajectory.segments
        ]
        routes = next((s.routes_TLK.shape[1:] for s in segments if s.routes_TLK is not None), None)
        for segment in segments:
            shape = None if segment.routes_TLK is None else segment.routes_TLK.shape[1:]
            if shape != routes:
                raise ValueError(
                    f"segment of {segment.prompt_id}: routes_TLK has (L, K) = {shape}, another "
                    f"segment of the batch has {routes}; record all, or none"
                )
        kept = any(segment.sampling_mask is not None for segment in segments)
        chosen = [s.selected_TLk.shape[1:] for s in segments if s.selected_TLk is not None]
        selected = (chosen[0][0], max(width for _, width in chosen)) if chosen else None
        numbers = {id(segment): number for number, segment in enumerate(watched)}
        routes = None if routes is None else (routes[0], routes[1])
        return Layout(routes=routes, kept=kept, selected=selected, watched=numbers)


class Piece(NamedTuple):
    """Tokens `start` … `stop` − 1 of a segment, as they are packed."""

    segment: Segment
    start: int
    stop: int
    sequence: int
    """Number of its trajectory in the micro-batch."""
    follows: int = -1
    """As in `MicroBatch.follows`."""

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @staticmethod
    def whole(segment: Segment, sequence: int) -> Piece:
        return Piece(segment, 0, len(segment.token_ids_T), sequence)


def _pieces(bundles: Sequence[Bundle]) -> tuple[list[Piece], list[Work]]:
    """What is packed, in order, and the trajectories that it is of."""
    pieces: list[Piece] = []
    work: list[Work] = []
    for bundle in bundles:
        prefix = -1
        if bundle.shared:
            prefix = len(pieces)
            pieces.append(Piece(bundle.work[0].segments[0], 0, bundle.shared, len(work)))
        for item in bundle.work:
            # Parts of a trajectory follow one another.
            if not (work and item.split >= 0 and item.split == work[-1].split):
                work.append(item)
            for segment in item.segments:
                whole = Piece.whole(segment, len(work) - 1)
                pieces.append(whole._replace(start=bundle.shared, follows=prefix))
    return pieces or [Piece.whole(PADDING, 0)], work


def _join(bundles: Sequence[Bundle], layout: Layout) -> MicroBatch:
    """Lay all segments of `bundles` end to end: the one place where per-token data is packed."""
    pieces, work = _pieces(bundles)
    counts = [piece.tokens for piece in pieces]
    owners = [piece.sequence for piece in pieces]
    owned = work or [_NOBODY]
    sets = [_kept(piece.segment).slice(piece.start, piece.stop) for piece in pieces]
    numbers = [layout.watched.get(id(piece.segment), -1) for piece in pieces]
    numbers = [
        number if piece.stop == len(piece.segment.token_ids_T) else -1  # not a beginning
        for piece, number in zip(pieces, numbers, strict=True)
    ]

    def joined(per_token: Callable[[Segment], NDArray[T]]) -> NDArray[T]:
        return np.concatenate([per_token(one.segment)[one.start : one.stop] for one in pieces])

    def spread(values: Sequence[float], kind: type[T]) -> NDArray[T]:
        return np.repeat(np.asarray(values, kind), counts)

    return MicroBatch(
        token_ids_N=joined(lambda segment: segment.token_ids_T),
        position_N=np.concatenate(
            [np.arange(one.start, one.stop, dtype=np.int32) for one in pieces]
        ),
        segment_N=spread(range(len(pieces)), np.int32),
        sequence_N=spread(owners, np.int64),
        trainable_N=joined(lambda segment: segment.trainable_T),
        logp_old_N=joined(lambda segment: segment.logp_old_T),
        advantage_N=spread([owned[owner].advantage for owner in owners], np.float32),
        kl_coef_N=spread([owned[owner].kl_coef for owner in owners], np.float32),
        sequence_tokens_S=np.asarray([item.sampled_tokens for item in work], np.int64),
        sequence_weight_S=np.asarray([item.weight for item in work], np.float32),
        routes_NLK=None if layout.routes is None else joined(partial(_routes, shape=layout.routes)),
        sampling_mask=SamplingMasks.concat(sets) if layout.kept else None,
        selected_NLk=None
        if layout.selected is None
        else joined(partial(_selected, shape=layout.selected)),
        split_S=np.asarray([item.split for item in work], np.int64)
        if any(item.split >= 0 for item in work)
        else None,
        follows=np.asarray([piece.follows for piece in pieces], np.int64)
        if any(bundle.shared for bundle in bundles)
        else None,
        watched=np.asarray(numbers, np.int64) if max(numbers) >= 0 else None,
        loss=layout.loss,
    )


def _selected(segment: Segment, shape: tuple[int, int]) -> NDArray[np.int32]:
    return segment.selection(*shape)


def _routes(segment: Segment, shape: tuple[int, int]) -> NDArray[np.int16]:
    if segment.routes_TLK is None:  # padding alone: `Layout.of` refuses it of a recorded segment
        return np.full((len(segment.token_ids_T), *shape), NO_ROUTE, np.int16)
    return segment.routes_TLK.astype(np.int16, copy=False)


def _kept(segment: Segment) -> SamplingMasks:
    return (
        SamplingMasks.empty(len(segment.token_ids_T))
        if segment.sampling_mask is None
        else segment.sampling_mask
    )


PADDING = Segment(
    prompt_id="padding",
    token_ids_T=np.zeros(1, np.int32),
    trainable_T=np.zeros(1, np.bool_),
    logp_old_T=np.zeros(1, np.float32),
    version_T=np.full(1, -1, np.int32),
)
"""What a rank without work computes: one token that trains nothing."""
_NOBODY = Work((PADDING,), 1, advantage=0.0, kl_coef=0.0, weight=1.0)
