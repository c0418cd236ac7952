"""What engines record about sampled tokens, besides their log-probabilities, and trainers replay.

An engine records each turn. `Recordings` are its arrays, which are so large that they stay on the
engine's node. `StoredRecordings` stand in for them until a rank packs them (`Segment.loaded`).
`join_recordings` joins the arrays of a segment's turns. See `keel.rl.types` for the alignment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_ROUTE = -1
"""Value in `routes_TLK` for positions without recorded experts, where the trainer's own router
chooses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMasks:
    """Each token's sampling mask: the ids left to sample from after top-p or top-k truncation. A
    mask is empty if sampling was not truncated."""

    ids: NDArray[np.int32]
    """[nnz] Ids of all masks, concatenated."""
    offsets: NDArray[np.int64]
    """[T+1] Mask boundaries: the mask of token t is `ids[offsets[t]:offsets[t+1]]`."""

    def __post_init__(self) -> None:
        offsets = self.offsets
        if (
            offsets.ndim != 1
            or len(offsets) == 0
            or offsets[0] != 0
            or offsets[-1] != len(self.ids)
        ):
            raise ValueError(
                f"sampling masks: offsets must run from 0 to len(ids) = {len(self.ids)}, got "
                f"{offsets[:3]}…"
            )
        if (np.diff(offsets) < 0).any():
            raise ValueError("sampling masks: offsets must not decrease")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, token: int) -> NDArray[np.int32]:
        return self.ids[self.offsets[token] : self.offsets[token + 1]]

    def sizes(self) -> NDArray[np.int64]:
        """Return the number of ids in each mask, [T], or 0 where sampling was not truncated."""
        return np.diff(self.offsets)

    def slice(self, start: int, stop: int) -> SamplingMasks:
        """Return the masks for tokens `start` to `stop` − 1."""
        first, last = self.offsets[start], self.offsets[stop]
        return SamplingMasks(
            ids=self.ids[first:last], offsets=self.offsets[start : stop + 1] - first
        )

    @staticmethod
    def from_lists(spans: Sequence[Sequence[int] | NDArray[Any]]) -> SamplingMasks:
        """Build the masks from one list of ids per token."""
        sizes = np.fromiter((len(span) for span in spans), np.int64, len(spans))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        parts = [np.asarray(span, np.int32) for span in spans if len(span)]
        ids = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        return SamplingMasks(ids=ids, offsets=offsets)

    @staticmethod
    def empty(tokens: int) -> SamplingMasks:
        """Build empty masks for `tokens` tokens that were sampled without truncation."""
        return SamplingMasks(ids=np.zeros(0, np.int32), offsets=np.zeros(tokens + 1, np.int64))

    @staticmethod
    def concat(parts: Sequence[SamplingMasks]) -> SamplingMasks:
        if not parts:
            return SamplingMasks.empty(0)
        starts = np.cumsum([0, *(len(part.ids) for part in parts)])
        offsets = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=False)]
        return SamplingMasks(
            ids=np.concatenate([part.ids for part in parts]),
            offsets=np.concatenate([np.zeros(1, np.int64), *offsets]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recordings:
    """The large arrays recorded for a turn, or for a completion of a group. `Segment` describes
    them."""

    routes_TLK: NDArray[Any] | None = None
    """Experts at positions `TurnRequest.routes_from` and later. The last token has no row, because
    it was never an input."""
    sampling_mask: SamplingMasks | None = None
    """Masks of the sampled tokens."""
    selected_TLb: NDArray[np.uint8] | None = None
    """Selections of sparse attention, with the same rows as `routes_TLK`."""

    @property
    def nbytes(self) -> int:
        masks = self.sampling_mask
        masks_bytes = 0 if masks is None else masks.ids.nbytes + masks.offsets.nbytes
        arrays = (self.routes_TLK, self.selected_TLb)
        return masks_bytes + sum(array.nbytes for array in arrays if array is not None)

    @property
    def lengths(self) -> dict[str, int]:
        """Number of rows or masks in each array that was recorded."""
        arrays = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: len(array) for name, array in arrays.items() if array is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecordings:
    """A stand-in for the recordings of a turn or segment, which stay on the node that made them
    until a rank packs them."""

    parts: tuple[tuple[int, Any], ...]
    """The `Recordings` in the order of the turns, as object references of Ray or, if they are
    small, themselves. Each comes with the position of the first token that its sampling masks
    describe."""
    lengths: Mapping[str, int] = field(default_factory=dict[str, int])
    """`Recordings.lengths` of a turn, or empty for a segment."""
    routes: tuple[int, int] | None = None
    """(L, K) of the routes, or None without routes."""
    selected: tuple[int, int] | None = None
    """(L, b) of the selections, or None without selections."""
    mask_sizes_T: NDArray[Any] | None = None
    """Number of ids in each sampling mask, or None if there are no masks."""
    prefix_hash_P: NDArray[np.uint64] | None = None
    """Hash of the routes of each token before the first sampled one, or None without routes."""

    @staticmethod
    def of(recordings: Recordings, prefix: int) -> StoredRecordings:
        """Describe the recordings of a turn or completion, whose first `prefix` rows precede the
        first sampled token. They become its only part, with routes in the narrowest type."""
        routes, masks = recordings.routes_TLK, recordings.sampling_mask
        selected = recordings.selected_TLb
        narrow = replace(recordings, routes_TLK=None if routes is None else _narrow(routes))
        return StoredRecordings(
            parts=((0, narrow),),
            lengths=recordings.lengths,
            routes=None if routes is None else routes.shape[1:],
            selected=None if selected is None else selected.shape[1:],
            mask_sizes_T=None if masks is None else _narrow(masks.sizes()),
            prefix_hash_P=None if routes is None else _hash_rows(routes[:prefix]),
        )

    @staticmethod
    def concat(turns: Sequence[tuple[int, StoredRecordings]], tokens: int) -> StoredRecordings:
        """Concatenate the stored recordings of a segment's turns. The segment has `tokens` tokens,
        and each turn is given with the position of its first sampled token."""
        masked = [(start, one.mask_sizes_T) for start, one in turns if one.mask_sizes_T is not None]
        sizes = np.zeros(tokens, np.result_type(np.uint8, *(sizes for _, sizes in masked)))
        for start, part in masked:
            sizes[start : start + len(part)] = part
        return StoredRecordings(
            parts=tuple((start, part) for start, one in turns for _, part in one.parts),
            routes=turns[0][1].routes,
            selected=next((one.selected for _, one in reversed(turns) if one.selected), None),
            mask_sizes_T=sizes if masked else None,
            prefix_hash_P=turns[0][1].prefix_hash_P,
        )


def join_recordings(turns: Sequence[tuple[int, Recordings]], tokens: int) -> dict[str, Any]:
    """Join the recordings of turns into the fields `routes_TLK`, `sampling_mask` and `selected_TLb`
    of a `Segment` with `tokens` tokens. Each turn comes with the position of the first token that
    its sampling masks describe."""
    masks: list[SamplingMasks] = []
    end = 0
    for start, turn in turns:
        if turn.sampling_mask:  # not without tokens
            masks += [SamplingMasks.empty(start - end), turn.sampling_mask]
            end = start + len(turn.sampling_mask)
    routes = selected = None
    if parts := [turn.routes_TLK for _, turn in turns if turn.routes_TLK is not None]:
        rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
        last = np.full((1, *rows.shape[1:]), NO_ROUTE, np.int16)
        routes = np.concatenate([rows[: tokens - 1], last], dtype=np.int16, casting="unsafe")
    if bitmaps := [turn.selected_TLb for _, turn in turns if turn.selected_TLb is not None]:
        selected = np.zeros((tokens, bitmaps[0].shape[1], bitmaps[-1].shape[2]), np.uint8)
        start = 0
        for bitmap in bitmaps:
            part = selected[start : min(start + len(bitmap), tokens - 1)]
            part[..., : bitmap.shape[2]] = bitmap[: len(part)]
            start += len(bitmap)
    if masks:
        masks.append(SamplingMasks.empty(max(0, tokens - end)))
    return {
        "routes_TLK": routes,
        "sampling_mask": SamplingMasks.concat(masks) if masks else None,
        "selected_TLb": selected,
    }


def _narrow(values: NDArray[Any]) -> NDArray[Any]:
    """Convert integers to the narrowest type that holds all of them."""
    limits = (values.min(initial=0), values.max(initial=0))
    return values.astype(np.result_type(*map(np.min_scalar_type, limits)), copy=False)


def _hash_rows(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Hash each row of [R, …] integers. Equal rows have equal hashes in every process."""
    rows = values.reshape(len(values), prod(values.shape[1:])).astype(np.uint64)
    return rows @ np.random.default_rng(0).integers(2**64 - 1, size=rows.shape[1], dtype=np.uint64)
