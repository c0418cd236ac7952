"""Pack scored trajectories into micro-batches so that all data-parallel replicas process about the
same number of tokens. `plan_packing` decides on the driver which trajectories go where, and each
rank builds the micro-batches of its replica with `PackPlan.pack`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from keel.rl.prefix_sharing import PackItem, PrefixGroup, arrange, split_long
from keel.rl.recordings import NO_ROUTE, Recordings, SamplingMasks
from keel.rl.types import ScoredGroup, Segment

T = TypeVar("T", bound=np.generic)
Loss = Literal["grpo", "nll"]
"""Loss function from `keel.rl.losses` that is used to train on a micro-batch."""


def _require(ok: bool | np.bool_, message: str) -> None:
    if not ok:
        raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Segments of S trajectories, concatenated into a row of N tokens. See `keel.rl.types` for the
    alignment. The constructor checks on the host what `keel.rl.losses.grpo_loss` cannot check
    cheaply on a GPU."""

    token_ids_N: NDArray[np.int32]
    position_N: NDArray[np.int32]
    """Position of each token in its context. A segment's positions start at 0, or at the end of its
    shared prefix if it follows one."""
    segment_N: NDArray[np.int32]
    """Index of the segment that contains each token. A token attends only to its own segment and to
    the shared prefix that this segment follows."""
    sequence_N: NDArray[np.int64]
    """Index of the trajectory that contains each token, 0 … S−1. In padding (S = 0), it is 0."""
    trainable_N: NDArray[np.bool_]
    logp_old_N: NDArray[np.float32]
    advantage_N: NDArray[np.float32]
    kl_coef_N: NDArray[np.float32]
    sequence_tokens_S: NDArray[np.int64]
    """Number of sampled tokens |o_i| in each trajectory, including those in other micro-batches."""
    sequence_weight_S: NDArray[np.float32]
    """Loss weight of each trajectory. The mean over the step is 1 (see `plan_packing`)."""
    routes_NLK: NDArray[np.int16] | None = None
    """Recorded experts of each token, input-aligned. For rows of −1, the trainer's own router
    chooses the experts."""
    sampling_mask: SamplingMasks | None = None
    selected_NLb: NDArray[np.uint8] | None = None
    """Bitmaps of the positions that sparse attention selected during sampling, input-aligned. For
    rows of zeros, the trainer selects the positions itself."""
    split_S: NDArray[np.int64] | None = None
    """Index of each trajectory that spans several micro-batches, 0 … P−1 over the whole step, or −1
    for a trajectory that is complete in this micro-batch. None means that all are complete."""
    reference_S: NDArray[np.int64] | None = None
    """Index of the reference model for each trajectory's KL term. None means that all trajectories
    use the first one."""
    follows: NDArray[np.int64] | None = None
    """[segments] Index of the shared prefix that each segment continues (`keel.rl.prefix_sharing`),
    or −1 without one. The shared prefix itself is not trainable. None means that no prefix is
    shared."""
    saved: NDArray[np.int64] | None = None
    """[segments] Index of each segment in the `saved` argument of `plan_packing`, or −1 if it is
    not saved. None means that no segment is saved."""
    loss: Loss = "grpo"

    def __post_init__(self) -> None:
        tokens, sequences = len(self.token_ids_N), len(self.sequence_tokens_S)
        _require(tokens > 0, "micro-batch: no tokens. Pad with an untrainable one")
        for name in _PER_TOKEN:
            value = getattr(self, name)
            _require(
                value is None or len(value) == tokens,
                f"micro-batch: {name} must have {tokens} entries, one per token",
            )
        starts = np.flatnonzero(np.diff(self.segment_N, prepend=self.segment_N[0] - 1))
        lengths, trainable = np.diff(starts, append=tokens), self.trainable_N
        before = np.zeros(len(starts), np.int64)
        if (follows := self.follows) is not None:
            fits = len(follows) == len(starts) and (follows < np.arange(len(starts))).all()
            shared = np.unique(follows[follows >= 0]) if fits else ()
            trained = np.add.reduceat(trainable, starts)
            _require(
                fits and (follows[shared] == -1).all() and not trained[shared].any(),
                "micro-batch: follows must point to earlier segments that are not trainable and "
                "follow no other",
            )
            before = np.where(follows >= 0, lengths[follows], 0)
        _require(
            (self.position_N == np.arange(tokens) - np.repeat(starts - before, lengths)).all(),
            "micro-batch: position_N must start at 0 in each segment, or at the end of the segment "
            "that it follows",
        )
        _require(
            not trainable[starts].any(),
            "micro-batch: trainable_N is True at the first token of a segment",
        )
        owner = self.sequence_N[trainable]
        _require(
            ((owner >= 0) & (owner < sequences)).all(),
            f"micro-batch: sequence_N is out of range for {sequences} sequences",
        )
        here = np.bincount(owner, minlength=sequences)
        _require(
            (self.sequence_tokens_S >= np.maximum(1, here)).all(),
            "micro-batch: sequence_tokens_S must be above 0 and count all trainable tokens",
        )
        split, weights = self.split_indices(), self.sequence_weight_S
        _require(
            len(split) == sequences and ((split >= 0) | (self.sequence_tokens_S == here)).all(),
            "micro-batch: split_S must be >= 0 for each sequence that is not complete here",
        )
        _require(
            len(weights) == sequences and (np.isfinite(weights) & (weights > 0)).all(),
            "micro-batch: sequence_weight_S must be finite and above 0 for each sequence",
        )
        for name in ("advantage_N", "kl_coef_N"):
            values: NDArray[np.float32] = getattr(self, name)[trainable]
            per_sequence = np.zeros(sequences, values.dtype)
            per_sequence[owner] = values
            _require(
                np.isfinite(values).all() and (values == per_sequence[owner]).all(),
                f"micro-batch: {name} must be finite and constant per sequence",
            )
        _require((self.kl_coef_N >= 0).all(), "micro-batch: kl_coef_N must not be negative")

    def split_indices(self) -> NDArray[np.int64]:
        """Return `split_S`, with −1 for every trajectory if it is None."""
        if self.split_S is not None:
            return self.split_S
        return np.full(len(self.sequence_tokens_S), -1, np.int64)

    @property
    def sampled_rows(self) -> NDArray[np.int64]:
        """Positions of the sampled tokens."""
        return np.flatnonzero(self.trainable_N)

    @property
    def shared_tokens(self) -> int:
        """Number of tokens saved by prefix sharing."""
        if self.follows is None:
            return 0
        lengths = np.bincount(self.segment_N)
        followed = self.follows[self.follows >= 0]
        return int(lengths[followed].sum() - lengths[np.unique(followed)].sum())

    def context_rows(self, segment: int) -> NDArray[np.int64]:
        """Return the positions of a segment's context in the packed row, including the shared
        prefix that it follows. For a shared prefix, return the context of the first segment that
        follows it."""
        if self.follows is not None:
            followers = np.flatnonzero(self.follows == segment)
            segment = int(followers[0]) if len(followers) else segment
        rows = np.flatnonzero(self.segment_N == segment)
        if self.follows is None or self.follows[segment] < 0:
            return rows
        return np.concatenate([np.flatnonzero(self.segment_N == self.follows[segment]), rows])


_PER_TOKEN = (
    *("token_ids_N", "position_N", "segment_N", "sequence_N", "trainable_N", "logp_old_N"),
    *("advantage_N", "kl_coef_N", "routes_NLK", "sampling_mask", "selected_NLb"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One data-parallel replica's micro-batches for an optimizer step. Every replica has the same
    number of them."""

    micro_batches: tuple[MicroBatch, ...]
    total_sequences: int
    """Number of trajectories in the whole optimizer step, over all replicas. It is the denominator
    in Eq. 8."""
    total_tokens: int = 0
    """Number of tokens in the whole optimizer step, without padding, or 0 if unknown. It is the
    denominator of the indexer's loss (`keel.model.sparse`)."""
    split_sequences: int = 0
    """P, the number of trajectories that span several micro-batches, over all replicas."""
    mask_pass: tuple[MicroBatch, ...] = ()
    """Micro-batches for a forward pass without gradient before `micro_batches`. They contain the
    segments of split trajectories that the sequence mask may drop, because the mask depends on the
    whole trajectory (`keel.rl.offpolicy.GapTotals`). All replicas have the same number."""
    signal: bool = True
    """True if the loss of the whole optimizer step has a gradient, because at least one group on
    any replica has a nonzero advantage or a KL term."""

    def __post_init__(self) -> None:
        _require(len(self.micro_batches) > 0, "train batch: micro_batches is empty")
        split_S = np.concatenate([one.split_indices() for one in self.micro_batches])
        split = np.unique(split_S[split_S >= 0])
        here = len(split) + int((split_S < 0).sum())
        _require(
            self.total_sequences >= max(1, here),
            f"train batch: total_sequences = {self.total_sequences}, but {here} are in it",
        )
        _require(
            split.max(initial=-1) < self.split_sequences,
            f"train batch: split_sequences = {self.split_sequences} is not above every split_S",
        )


def split_optimizer_steps(groups: Sequence[ScoredGroup], count: int) -> list[list[ScoredGroup]]:
    """Split groups evenly between `count` optimizer steps. Groups with a gradient (not
    `ScoredGroup.idle`) are also split evenly. If fewer groups have a gradient than there are steps,
    fewer steps are returned, because momentum would move the weights even without a gradient.
    Groups without completions are omitted."""
    sampled = [group for group in groups if group.group.trajectories]
    with_signal = [group for group in sampled if not group.idle]
    count = min(count, max(len(with_signal), bool(sampled)))
    edges = [len(with_signal) * step // max(1, count) for step in range(count + 1)]
    steps = [with_signal[a:b] for a, b in pairwise(edges)]
    for group in sampled:
        if group.idle:
            min(steps, key=len).append(group)
    return steps


def plan_packing(
    groups: Sequence[ScoredGroup],
    *,
    replicas: int,
    micro_batch_tokens: int,
    skip_uniform_groups: bool = False,
    mask_delta: float | None = None,
    share_prompts: bool = False,
    saved: Sequence[Segment] = (),
    references: Mapping[str, int] | None = None,
) -> list[PackPlan]:
    """Divide the groups of one optimizer step among the data-parallel replicas. Returns a plan for
    each replica. A micro-batch holds at most `micro_batch_tokens` tokens. A longer segment gets its
    own micro-batch. All replicas have the same number of micro-batches, so that their collectives
    match. Replicas with too few are given extra micro-batches that contain a single untrained
    token. The same `groups` always give the same result.

    A trajectory that fits into a micro-batch is never split, because the sequence mask needs all of
    it. The segments of a longer trajectory may go to any replica, and those without sampled tokens
    are omitted. If `mask_delta` (`algorithm.mask_delta`) is given, whatever its value, the segments
    of split trajectories with a negative advantage are also added to `mask_pass`.

    All groups have the same weight, regardless of how many trajectories they lost (Eq. 5). With B
    trajectories in n non-empty groups, a trajectory in a group of size G_i has the weight B / (n
    G_i) in a loss that divides by B. This is exactly 1 if all groups have the same size. The mean
    that is subtracted from a reward includes the reward itself, so a smaller group has smaller
    advantages, by a factor of 1 − 1/G_i on average. For a group with a single trajectory, only the
    KL term remains.

    `skip_uniform_groups` omits groups whose advantages and KL coefficient are all 0. They still
    count in `total_sequences` and n, so the gradient of the loss stays the same. Auxiliary
    objectives (sparse attention indexers and `kept_mass_coef`) ignore these groups.

    `share_prompts` packs the common prefix of a group once (`keel.rl.prefix_sharing`) wherever that
    makes the step faster.

    `references` gives `MicroBatch.reference_S` for each domain.

    `saved` lists segments to identify in `MicroBatch.saved`; segments that are not packed are
    ignored. If only some segments have sampling masks, the others are treated as sampled without
    truncation. Raises `ValueError` if there is no trajectory, if `replicas` or `micro_batch_tokens`
    is below 1, or if recorded routes are missing or differ in shape.
    """
    for name, value in (("replicas", replicas), ("micro_batch_tokens", micro_batch_tokens)):
        _require(value >= 1, f"{name} = {value}: must be at least 1")
    sampled = [group for group in groups if group.group.trajectories]
    _require(bool(sampled), f"none of the {len(groups)} groups has a trajectory to learn from")
    total_sequences = sum(len(group.group.trajectories) for group in sampled)
    items, split = split_long(
        [
            [
                PackItem(
                    trajectory.segments,
                    trajectory.sampled_tokens,
                    float(advantage),
                    group.group.prompt.kl_coef,
                    weight=total_sequences / (len(sampled) * len(group.group.trajectories)),
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
    layout: Any = {"replicas": replicas, "capacity": micro_batch_tokens}
    trained = arrange(items, share_prompts=share_prompts, **layout)
    forward: list[tuple[tuple[PrefixGroup, ...], ...]] = [()] * replicas
    maskable = [[one for one in group if one.split >= 0 and one.advantage < 0] for group in items]
    if mask_delta is not None and any(maskable):
        forward = arrange(maskable, **layout)
    segments = [s for g in sampled for t in g.group.trajectories for s in t.segments]
    routes_shape, selected_shape = _routes_shape(segments), _selected_shape(segments)
    has_sampling_masks = any(segment.mask_sizes_T is not None for segment in segments)
    numbers = {id(segment): number for number, segment in enumerate(saved)}
    return [
        PackPlan(
            micro_batches=plans,
            mask_pass=mask_pass,
            total_sequences=total_sequences,
            total_tokens=sum(one.tokens for each in trained for one in chain(*each)),
            split_sequences=split,
            signal=any(not group.idle for group in sampled),
            routes_shape=routes_shape,
            has_sampling_masks=has_sampling_masks,
            selected_shape=selected_shape,
            saved=tuple((numbers[id(s)], s) for s in _segments(chain(*plans)) if id(s) in numbers),
        )
        for plans, mask_pass in zip(trained, forward, strict=True)
    ]


def _routes_shape(segments: Sequence[Segment]) -> tuple[int, ...] | None:
    """Return (L, K) of the recorded routes, or None without routes. Raises `ValueError` if they
    differ or only some segments have routes."""
    shape = next((s.routes_shape for s in segments if s.routes_shape is not None), None)
    for segment in segments:
        _require(
            segment.routes_shape == shape,
            f"segment of {segment.prompt_id}: routes_TLK has (L, K) = {segment.routes_shape}, "
            f"but another segment of the batch has {shape}. Record routes for all or for none",
        )
    return shape


def _selected_shape(segments: Sequence[Segment]) -> tuple[int, int] | None:
    """Return (L, b) of the recorded sparse attention selections, or None without them."""
    shapes = [s.selected_shape for s in segments if s.selected_shape is not None]
    return (shapes[0][0], max(width for _, width in shapes)) if shapes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """A data-parallel replica's segments for an optimizer step. Its ranks pack them, so that
    recordings do not pass through the driver."""

    micro_batches: tuple[tuple[PrefixGroup, ...], ...]
    mask_pass: tuple[tuple[PrefixGroup, ...], ...] = ()
    total_sequences: int
    total_tokens: int
    split_sequences: int
    signal: bool = True
    routes_shape: tuple[int, ...] | None = None
    """(L, K) of the recorded routes, or None without routes. Like the next two fields, it is the
    same for all micro-batches of the step, so that every rank runs the same code."""
    has_sampling_masks: bool = False
    selected_shape: tuple[int, int] | None = None
    """(L, b) of the recorded sparse attention selections, or None without them."""
    saved: tuple[tuple[int, Segment], ...] = ()
    """The saved segments among them and their indices in `saved`."""
    loss: Loss = "grpo"

    @property
    def recording_refs(self) -> set[Any]:
        """References to the stored recordings that `pack` needs."""
        parts = chain(*self.micro_batches, *self.mask_pass)
        return {ref for segment in _segments(parts) for ref in segment.recording_refs}

    def pack(self, recordings: Mapping[Any, Recordings] = MappingProxyType({})) -> TrainBatch:
        """Build the micro-batches. `recordings` maps `recording_refs` to the stored recordings."""
        trained, forward = (
            tuple(self._join(plan, recordings) for plan in plans)
            for plans in (self.micro_batches, self.mask_pass)
        )
        return TrainBatch(
            micro_batches=trained,
            total_sequences=self.total_sequences,
            total_tokens=self.total_tokens,
            split_sequences=self.split_sequences,
            mask_pass=forward,
            signal=self.signal,
        )

    def _join(
        self, groups: Sequence[PrefixGroup], recordings: Mapping[Any, Recordings]
    ) -> MicroBatch:
        spans, items = _spans(groups)
        lengths = [span.stop - span.start for span in spans]
        owners = [(items or [_PADDING_ITEM])[span.sequence] for span in spans]
        numbers = {id(segment): number for number, segment in self.saved}
        saved = [
            # A shared prefix is not the saved segment.
            numbers.get(id(one.segment), -1) if one.stop == len(one.segment.token_ids_T) else -1
            for one in spans
        ]
        spans = [span._replace(segment=span.segment.loaded(recordings)) for span in spans]

        def joined(per_token: Callable[[Segment], NDArray[T]]) -> NDArray[T]:
            return np.concatenate([per_token(one.segment)[one.start : one.stop] for one in spans])

        def spread(values: Sequence[float], kind: type[T]) -> NDArray[T]:
            return np.repeat(np.asarray(values, kind), lengths)

        routes, masks, selected = None, None, None
        if (shape := self.routes_shape) is not None:
            routes = joined(lambda segment: _routes(segment, shape))
        if self.has_sampling_masks:
            masks = SamplingMasks.concat(
                [_sampling_masks(one.segment).slice(one.start, one.stop) for one in spans]
            )
        if self.selected_shape is not None:
            layers, width = self.selected_shape
            selected = joined(lambda segment: _selection(segment, layers, width))
        references, splits = [item.reference for item in items], [item.split for item in items]
        follows = [span.follows for span in spans]
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
            reference_S=np.asarray(references, np.int64) if any(references) else None,
            split_S=np.asarray(splits, np.int64) if max(splits, default=-1) >= 0 else None,
            follows=np.asarray(follows, np.int64) if max(follows) >= 0 else None,
            saved=np.asarray(saved, np.int64) if max(saved) >= 0 else None,
            loss=self.loss,
        )


class _Span(NamedTuple):
    """Tokens `start` to `stop` − 1 of a segment, which are packed as one segment."""

    segment: Segment
    start: int
    stop: int
    sequence: int
    follows: int = -1


def _spans(groups: Sequence[PrefixGroup]) -> tuple[list[_Span], list[PackItem]]:
    """Return the segments of a micro-batch and its trajectories, whose order defines
    `MicroBatch.sequence_N`."""
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


def _segments(groups: Iterable[PrefixGroup]) -> Iterator[Segment]:
    return (segment for group in groups for item in group.items for segment in item.segments)


def _routes(segment: Segment, shape: tuple[int, ...]) -> NDArray[np.int16]:
    if segment.routes_TLK is None:  # only padding: `_routes_shape` rejects other segments
        return np.full((len(segment.token_ids_T), *shape), NO_ROUTE, np.int16)
    return segment.routes_TLK


def _sampling_masks(segment: Segment) -> SamplingMasks:
    return segment.sampling_mask or SamplingMasks.empty(len(segment.token_ids_T))


def _selection(segment: Segment, layers: int, width: int) -> NDArray[np.uint8]:
    """Pad `selected_TLb` with zeros to [T, layers, width]."""
    padded = np.zeros((len(segment.token_ids_T), layers, width), np.uint8)
    if (recorded := segment.selected_TLb) is not None:
        _require(
            recorded.shape[1] == layers,
            f"segment of {segment.prompt_id}: selected_TLb has {recorded.shape[1]} layers, others "
            f"have {layers}",
        )
        padded[..., : recorded.shape[2]] = recorded
    return padded


_PADDING = Segment(
    prompt_id="padding",
    token_ids_T=np.zeros(1, np.int32),
    trainable_T=np.zeros(1, np.bool_),
    logp_old_T=np.zeros(1, np.float32),
    version_T=np.full(1, -1, np.int32),
)
"""Segment for replicas without work: a single token that is not trained on."""
_PADDING_ITEM = PackItem((_PADDING,), 1, advantage=0.0, kl_coef=0.0, weight=1.0)
