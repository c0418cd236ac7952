"""Packed micro-batches: the input of a training rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keel.rl.types import SamplingMasks

Loss = Literal["grpo", "nll"]
"""Loss of a micro-batch: `keel.rl.losses` or `keel.rl.sft`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Concatenated segments: N tokens of S trajectories, aligned as in `keel.rl.types`.

    Validates on the host what `keel.rl.losses.grpo_loss` does not validate on a GPU.
    """

    token_ids_N: NDArray[np.int32]
    position_N: NDArray[np.int32]
    """Position in the context: starts at 0 in each segment, or at the end of the segment that it
    follows."""
    segment_N: NDArray[np.int32]
    """Segment of the token. Attention stays in it and in the segment that it follows."""
    sequence_N: NDArray[np.int64]
    """Trajectory of the token, 0 … S−1; 0 in padding, where S = 0."""
    trainable_N: NDArray[np.bool_]
    logp_old_N: NDArray[np.float32]
    advantage_N: NDArray[np.float32]
    kl_coef_N: NDArray[np.float32]
    sequence_tokens_S: NDArray[np.int64]
    """|o_i| of each trajectory, over all of its segments, in any micro-batch."""
    sequence_weight_S: NDArray[np.float32]
    """Weight of each trajectory in the loss, 1 on average over the step; see `pack`."""
    routes_NLK: NDArray[np.int16] | None = None
    """Input-aligned; rows of −1 use the live router."""
    sampling_mask: SamplingMasks | None = None
    selected_NLk: NDArray[np.int32] | None = None
    """Input-aligned; rows of −1 use the live selection of sparse attention."""
    split_S: NDArray[np.int64] | None = None
    """Number 0 … P−1 of a trajectory that spans several micro-batches, counted over the step; −1
    for a trajectory that is complete here. None: all are complete."""
    follows: NDArray[np.int64] | None = None
    """[segments] index of the untrainable shared prefix that the segment continues
    (`keel.rl.packing.prefix_sharing`); −1: none. None: no prefix is shared."""
    watched: NDArray[np.int64] | None = None
    """[segments] index in `pack`'s `watched`; −1: not watched. None: no segment is watched."""
    loss: Loss = "grpo"

    def __post_init__(self) -> None:
        tokens, sequences = len(self.token_ids_N), len(self.sequence_tokens_S)
        for name in (*_PER_TOKEN, "routes_NLK", "sampling_mask", "selected_NLk"):
            value = getattr(self, name)
            if value is not None and len(value) != tokens:
                raise ValueError(
                    f"micro-batch: {name} has {len(value)} entries for {tokens} tokens"
                )
        if tokens == 0:
            raise ValueError("micro-batch: no tokens. Pad with an untrainable one")
        starts = np.flatnonzero(np.diff(self.segment_N, prepend=self.segment_N[0] - 1))
        lengths = np.diff(starts, append=tokens)
        trainable = self.trainable_N
        before = np.zeros(len(starts), np.int64)
        if self.follows is not None:
            self._check_follows(starts)
            before = np.where(self.follows >= 0, lengths[self.follows], 0)
        if (self.position_N != np.arange(tokens) - np.repeat(starts - before, lengths)).any():
            raise ValueError(
                "micro-batch: position_N must start at 0 in each segment, or at the end of the "
                "segment that it follows"
            )
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
                f"micro-batch: split_S must have {sequences} entries, >= 0 for each sequence with "
                "tokens in other micro-batches"
            )
        weights = self.sequence_weight_S
        if len(weights) != sequences or not (np.isfinite(weights) & (weights > 0)).all():
            raise ValueError(
                f"micro-batch: sequence_weight_S must have {sequences} finite entries above 0"
            )
        for name in ("advantage_N", "kl_coef_N"):
            values: NDArray[np.float32] = getattr(self, name)[trainable]
            per_sequence = np.zeros(sequences, values.dtype)
            per_sequence[owner] = values
            if not np.isfinite(values).all() or (values != per_sequence[owner]).any():
                raise ValueError(f"micro-batch: {name} must be finite and constant per sequence")
        if (self.kl_coef_N < 0).any():
            raise ValueError("micro-batch: kl_coef_N must not be negative")
        if self.routes_NLK is not None and self.routes_NLK.ndim != 3:
            raise ValueError(
                f"micro-batch: routes_NLK must be [N, L, K], has shape {self.routes_NLK.shape}"
            )

    @property
    def shared_tokens(self) -> int:
        """Number of tokens that sharing prefixes saves."""
        if self.follows is None:
            return 0
        lengths = np.bincount(self.segment_N)
        followed = self.follows[self.follows >= 0]
        return int(lengths[followed].sum() - lengths[np.unique(followed)].sum())

    def context_rows(self, segment: int) -> NDArray[np.int64]:
        """Rows of the whole context of a segment: the prefix that it follows, then the segment.

        A shared prefix gets the context of the first segment that follows it.
        """
        if self.follows is not None:
            followers = np.flatnonzero(self.follows == segment)
            segment = int(followers[0]) if len(followers) else segment
        rows = np.flatnonzero(self.segment_N == segment)
        if self.follows is None or self.follows[segment] < 0:
            return rows
        return np.concatenate([np.flatnonzero(self.segment_N == self.follows[segment]), rows])

    def _check_follows(self, starts: NDArray[np.int64]) -> None:
        follows, count = self.follows, len(starts)
        assert follows is not None
        if len(follows) != count or (follows >= np.arange(count)).any() or (follows < -1).any():
            raise ValueError(f"micro-batch: follows must have {count} indices of earlier segments")
        shared = np.unique(follows[follows >= 0])
        trained = np.add.reduceat(self.trainable_N, starts) > 0
        if trained[shared].any() or (follows[shared] >= 0).any():
            raise ValueError(
                "micro-batch: follows points to a segment that is trainable or follows another"
            )


_PER_TOKEN = (
    *("token_ids_N", "position_N", "segment_N", "sequence_N"),
    *("trainable_N", "logp_old_N", "advantage_N", "kl_coef_N"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One rank's share of an optimizer step. All ranks have the same number of micro-batches."""

    micro_batches: tuple[MicroBatch, ...]
    total_sequences: int
    """Trajectories in the whole optimizer step, over all ranks: the denominator of Eq. 8."""
    total_tokens: int = 0
    """Tokens of the whole optimizer step without padding: the denominator of an indexer's loss
    (`keel.model.sparse`). 0: unknown."""
    split_sequences: int = 0
    """P, the trajectories that span several micro-batches, over all ranks."""
    scored_first: tuple[MicroBatch, ...] = ()
    """Segments of split trajectories that the sequence mask may drop. They are scored without
    gradient before `micro_batches`, because the mask depends on the whole trajectory
    (`keel.rl.offpolicy.GapTotals`). All ranks have the same number."""
    signal: bool = True
    """True if the loss of the whole optimizer step has a gradient: some group on some rank has a
    nonzero advantage or a KL term."""

    def __post_init__(self) -> None:
        numbers = [
            np.full(len(one.sequence_tokens_S), -1) if one.split_S is None else one.split_S
            for one in self.micro_batches
        ]
        split = {int(number) for numbers_S in numbers for number in numbers_S if number >= 0}
        here = len(split) + sum(int((numbers_S < 0).sum()) for numbers_S in numbers)
        if not self.micro_batches:
            raise ValueError("train batch: no micro-batches. A rank without work needs padding")
        if self.total_sequences < max(1, here):
            raise ValueError(
                f"train batch: total_sequences = {self.total_sequences}, but {here} are in it"
            )
        if max(split, default=-1) >= self.split_sequences:
            raise ValueError(
                f"train batch: split_sequences = {self.split_sequences}, but the largest split_S "
                f"is {max(split)}"
            )
