"""From scored trajectories to packed micro-batches, balanced over ranks by tokens."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keel.rl.types import NO_ROUTE, KeptSets, ScoredGroup, Segment

Loss = Literal["grpo", "nll"]
"""What a micro-batch is for: `keel.rl.losses`, or `keel.rl.supervised.loss`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Segments laid end to end: N tokens of S trajectories. Alignment as in `keel.rl.types`.

    Checks on the host what `keel.rl.losses.grpo_loss` does not check on a GPU.
    """

    token_ids_N: NDArray[np.int32]
    position_N: NDArray[np.int32]
    """Position inside the token's segment; starts at 0 in each."""
    segment_N: NDArray[np.int32]
    """Which segment the token belongs to; attention never crosses it."""
    sequence_N: NDArray[np.int64]
    """Which trajectory the token belongs to, 0 … S−1 (0 in padding, where S = 0)."""
    trainable_N: NDArray[np.bool_]
    logp_old_N: NDArray[np.float32]
    advantage_N: NDArray[np.float32]
    kl_coef_N: NDArray[np.float32]
    sequence_tokens_S: NDArray[np.int64]
    """|o_i| of each trajectory, all its segments counted, here or elsewhere."""
    sequence_weight_S: NDArray[np.float32]
    """What each trajectory counts in the loss, 1 on average over the step: see `pack`."""
    routes_NLK: NDArray[np.int16] | None = None
    """Input-aligned; rows of −1 use the live router."""
    kept: KeptSets | None = None
    selected_NLk: NDArray[np.int32] | None = None
    """Input-aligned; rows of −1 have the live selection of sparse attention."""
    split_S: NDArray[np.int64] | None = None
    """The number of a trajectory that has segments in other micro-batches too, among such ones of
    the step (0 … P−1); −1 for one that is all here. None: all are."""
    watched: NDArray[np.int64] | None = None
    """[segments] which of those that `pack` was asked to watch it is; −1: none. None: none are."""
    loss: Loss = "grpo"

    def __post_init__(self) -> None:
        tokens, sequences = len(self.token_ids_N), len(self.sequence_tokens_S)
        for name in (*PER_TOKEN, "routes_NLK", "kept", "selected_NLk"):
            value = getattr(self, name)
            if value is not None and len(value) != tokens:
                raise ValueError(
                    f"micro-batch: {name} has {len(value)} entries for {tokens} tokens"
                )
        if tokens == 0:
            raise ValueError("micro-batch: no tokens; pad with an untrainable one")
        starts = np.flatnonzero(np.diff(self.segment_N, prepend=self.segment_N[0] - 1))
        lengths = np.diff(starts, append=tokens)
        if (self.position_N != np.arange(tokens) - np.repeat(starts, lengths)).any():
            raise ValueError("micro-batch: position_N must count from 0 in each segment")
        trainable = self.trainable_N
        if trainable[starts].any():
            raise ValueError("micro-batch: trainable_N is True at the first token of a segment")
        owner = self.sequence_N[trainable]
        if ((owner < 0) | (owner >= sequences)).any():
            raise ValueError(f"micro-batch: sequence_N is out of range for {sequences} sequences")
        here = np.bincount(owner, minlength=sequences)
        if (self.sequence_tokens_S < np.maximum(1, here)).any():
            raise ValueError(
                "micro-batch: sequence_tokens_S must be above 0 and count all trainable tokens"
            )
        split = np.full(sequences, -1) if self.split_S is None else self.split_S
        if len(split) != sequences or ((split < 0) & (self.sequence_tokens_S != here)).any():
            raise ValueError(
                f"micro-batch: split_S must be {sequences} numbers, at least 0 for each sequence "
                "that has not all of its sequence_tokens_S here: the sequence mask needs the rest"
            )
        weights = self.sequence_weight_S
        if len(weights) != sequences or not (np.isfinite(weights) & (weights > 0)).all():
            raise ValueError(
                f"micro-batch: sequence_weight_S must be {sequences} finite numbers above 0"
            )
        for name in ("advantage_N", "kl_coef_N"):
            values: NDArray[np.float32] = getattr(self, name)[trainable]
            one = np.zeros(sequences, values.dtype)
            one[owner] = values
            if not np.isfinite(values).all() or (values != one[owner]).any():
                raise ValueError(f"micro-batch: {name} must be one finite number a sequence")
        if (self.kl_coef_N < 0).any():
            raise ValueError("micro-batch: kl_coef_N must not be negative")
        if self.routes_NLK is not None and self.routes_NLK.ndim != 3:
            raise ValueError(
                f"micro-batch: routes_NLK must be [N, L, K], has shape {self.routes_NLK.shape}"
            )


PER_TOKEN = (
    *("token_ids_N", "position_N", "segment_N", "sequence_N"),
    *("trainable_N", "logp_old_N", "advantage_N", "kl_coef_N"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One rank's share of an optimizer step. All ranks have equally many micro-batches."""

    micro_batches: tuple[MicroBatch, ...]
    total_sequences: int
    """Trajectories in the whole optimizer step, over all ranks: the denominator of Eq. 8."""
    total_tokens: int = 0
    """Tokens of all micro-batches in the whole optimizer step, those that are only padding left
    out: the denominator of an indexer's loss (`keel.model.sparse`). 0: nobody has counted."""
    split_sequences: int = 0
    """P, those of them whose segments lie in several micro-batches, over all ranks."""
    scored_first: tuple[MicroBatch, ...] = ()
    """Segments of those that the sequence mask may drop, to be scored without gradient before any
    of `micro_batches`: its decision is about all of a trajectory (`keel.rl.offpolicy.GapTotals`).
    All ranks have equally many."""

    def __post_init__(self) -> None:
        numbers = [
            np.full(len(one.sequence_tokens_S), -1) if one.split_S is None else one.split_S
            for one in self.micro_batches
        ]
        split = {int(number) for numbers_S in numbers for number in numbers_S if number >= 0}
        here = len(split) + sum(int((numbers_S < 0).sum()) for numbers_S in numbers)
        if not self.micro_batches:
            raise ValueError("train batch: no micro-batches; a rank without work needs padding")
        if self.total_sequences < max(1, here):
            raise ValueError(
                f"train batch: total_sequences = {self.total_sequences}, but {here} are in it"
            )
        if max(split, default=-1) >= self.split_sequences:
            raise ValueError(
                f"train batch: split_sequences = {self.split_sequences}, but split_S goes up to "
                f"{max(split)}"
            )


def pack(
    groups: Sequence[ScoredGroup],
    *,
    ranks: int,
    micro_batch_tokens: int,
    skip_uniform_groups: bool = False,
    sequence_mask: bool = True,
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
    still count in `total_sequences` and n, so the gradient is the same.

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
    work = [
        Work(
            trajectory.segments,
            trajectory.sampled_tokens,
            float(advantage),
            group.group.prompt.kl_coef,
            weight=total_sequences / (sampled * len(group.group.trajectories)),
        )
        for group in groups
        if not (skip_uniform_groups and group.uniform and group.group.prompt.kl_coef == 0)
        for trajectory, advantage in zip(group.group.trajectories, group.advantages_G, strict=True)
    ]
    work, split = split_long(work, micro_batch_tokens)
    doubtful = [item for item in work if item.split >= 0 and item.advantage < 0]
    trained = deal(work, layout, ranks=ranks, capacity=micro_batch_tokens)
    scored: list[tuple[MicroBatch, ...]] = [()] * ranks
    if sequence_mask and doubtful:
        scored = deal(doubtful, layout, ranks=ranks, capacity=micro_batch_tokens)
    return [
        TrainBatch(
            micro_batches=micro_batches,
            total_sequences=total_sequences,
            total_tokens=sum(item.tokens for item in work),
            split_sequences=split,
            scored_first=first,
        )
        for micro_batches, first in zip(trained, scored, strict=True)
    ]


def balance(tokens: Sequence[int], *, ranks: int, capacity: int) -> list[list[list[int]]]:
    """Indices of `tokens` as [rank][micro-batch][item], equally many micro-batches a rank.

    Longest first into the emptiest bin, with the fewest bins (a multiple of `ranks`) for which that
    fits `capacity`; a longer item sits alone. Bins of similar size then run at the same time on all
    ranks, dealt back and forth so that the sums match too.
    """
    order = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))
    whole = sum(min(size, capacity) for size in tokens)
    alone = sum(2 * size > capacity for size in tokens)  # no two of them in a bin
    rows = max(1, -(-whole // (ranks * capacity)), -(-alone // ranks))
    while (bins := _fill(tokens, order, rows * ranks, capacity)) is None:
        rows += 1
    bins.sort(key=lambda chosen: (-sum(tokens[i] for i in chosen), chosen))
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    for row in range(rows):
        across = bins[row * ranks : (row + 1) * ranks]
        for rank, chosen in enumerate(across if row % 2 == 0 else reversed(across)):
            dealt[rank].append(sorted(chosen))
    return dealt


def _fill(
    tokens: Sequence[int], order: Iterable[int], count: int, capacity: int
) -> list[list[int]] | None:
    """`count` bins, or None where the emptiest cannot take the next item."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, index) for index in range(count)]
    for item in order:
        load, index = loads[0]
        if load and load + tokens[item] > capacity:
            return None
        bins[index].append(item)
        heapq.heapreplace(loads, (load + tokens[item], index))
    return bins


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


def split_long(work: Sequence[Work], capacity: int) -> tuple[list[Work], int]:
    """Trajectories that do not fit `capacity` by their segments, and how many such there are."""
    parts: list[Work] = []
    count = 0
    for item in work:
        if item.tokens > capacity:
            item = replace(item, segments=tuple(s for s in item.segments if s.trainable_T.any()))
        if item.tokens <= capacity or len(item.segments) == 1:
            parts.append(item)
        else:
            parts += (replace(item, segments=(s,), split=count) for s in item.segments)
            count += 1
    return parts, count


def deal(
    work: Sequence[Work], layout: Layout, *, ranks: int, capacity: int
) -> list[tuple[MicroBatch, ...]]:
    """Each rank's micro-batches."""
    dealt = balance([item.tokens for item in work], ranks=ranks, capacity=capacity)
    return [tuple(_join([work[i] for i in chosen], layout) for chosen in bins) for bins in dealt]


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
        kept = any(segment.kept is not None for segment in segments)
        chosen = [s.selected_TLk.shape[1:] for s in segments if s.selected_TLk is not None]
        selected = (chosen[0][0], max(width for _, width in chosen)) if chosen else None
        numbers = {id(segment): number for number, segment in enumerate(watched)}
        routes = None if routes is None else (routes[0], routes[1])
        return Layout(routes=routes, kept=kept, selected=selected, watched=numbers)


def _join(work: Sequence[Work], layout: Layout) -> MicroBatch:
    """Lay all segments of `work` end to end: the one place where per-token data is packed."""
    whole: list[Work] = []
    for item in work:  # parts of a trajectory follow one another
        if whole and item.split >= 0 and item.split == whole[-1].split:
            item = replace(item, segments=whole.pop().segments + item.segments)
        whole.append(item)
    work = whole
    pieces = [
        (segment, sequence, item.advantage, item.kl_coef)
        for sequence, item in enumerate(work)
        for segment in item.segments
    ] or [(PADDING, 0, 0.0, 0.0)]
    segments, sequences, advantages, kl_coefs = zip(*pieces, strict=True)
    lengths = [len(segment.token_ids_T) for segment in segments]
    numbers = [layout.watched.get(id(segment), -1) for segment in segments]
    return MicroBatch(
        token_ids_N=np.concatenate([segment.token_ids_T for segment in segments]),
        position_N=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        segment_N=np.repeat(np.arange(len(segments), dtype=np.int32), lengths),
        sequence_N=np.repeat(np.asarray(sequences, np.int64), lengths),
        trainable_N=np.concatenate([segment.trainable_T for segment in segments]),
        logp_old_N=np.concatenate([segment.logp_old_T for segment in segments]),
        advantage_N=np.repeat(np.asarray(advantages, np.float32), lengths),
        kl_coef_N=np.repeat(np.asarray(kl_coefs, np.float32), lengths),
        sequence_tokens_S=np.asarray([item.sampled_tokens for item in work], np.int64),
        sequence_weight_S=np.asarray([item.weight for item in work], np.float32),
        routes_NLK=None
        if layout.routes is None
        else np.concatenate([_routes(segment, layout.routes) for segment in segments]),
        kept=KeptSets.concat([_kept(segment) for segment in segments]) if layout.kept else None,
        selected_NLk=None
        if layout.selected is None
        else np.concatenate([segment.selection(*layout.selected) for segment in segments]),
        split_S=np.asarray([item.split for item in work], np.int64)
        if any(item.split >= 0 for item in work)
        else None,
        watched=np.asarray(numbers, np.int64) if max(numbers) >= 0 else None,
        loss=layout.loss,
    )


def _routes(segment: Segment, shape: tuple[int, int]) -> NDArray[np.int16]:
    if segment.routes_TLK is None:  # padding alone: `Layout.of` refuses it of a recorded segment
        return np.full((len(segment.token_ids_T), *shape), NO_ROUTE, np.int16)
    return segment.routes_TLK.astype(np.int16, copy=False)


def _kept(segment: Segment) -> KeptSets:
    return KeptSets.empty(len(segment.token_ids_T)) if segment.kept is None else segment.kept


PADDING = Segment(
    prompt_id="padding",
    token_ids_T=np.zeros(1, np.int32),
    trainable_T=np.zeros(1, np.bool_),
    logp_old_T=np.zeros(1, np.float32),
    version_T=np.full(1, -1, np.int32),
)
"""What a rank without work computes: one token that trains nothing."""
