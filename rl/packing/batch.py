"""Packed micro-batches, the input of a training rank."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keel.rl.types import SamplingMasks

Loss = Literal["grpo", "nll"]
"""Loss function from `keel.rl.losses` that is used to train on a micro-batch."""


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
    """Loss weight of each trajectory. The mean over the step is 1 (see `pack`)."""
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
    """[segments] Index of the shared prefix that each segment continues
    (`keel.rl.packing.prefix_sharing`), or −1 without one. The shared prefix itself is not
    trainable. None means that no prefix is shared."""
    watched: NDArray[np.int64] | None = None
    """[segments] Index of each segment in the `watched` argument of `pack`, or −1 if it is not
    watched. None means that no segment is watched."""
    loss: Loss = "grpo"

    def __post_init__(self) -> None:
        tokens, sequences = len(self.token_ids_N), len(self.sequence_tokens_S)
        for name in (*_PER_TOKEN, "routes_NLK", "sampling_mask", "selected_NLb"):
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
        if self.reference_S is not None and len(self.reference_S) != sequences:
            raise ValueError(f"micro-batch: reference_S must have {sequences} entries")
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
    """One rank's micro-batches for an optimizer step. Every rank has the same number of them."""

    micro_batches: tuple[MicroBatch, ...]
    total_sequences: int
    """Number of trajectories in the whole optimizer step, over all ranks. It is the denominator in
    Eq. 8."""
    total_tokens: int = 0
    """Number of tokens in the whole optimizer step, without padding, or 0 if unknown. It is the
    denominator of the indexer's loss (`keel.model.sparse`)."""
    split_sequences: int = 0
    """P, the number of trajectories that span several micro-batches, over all ranks."""
    scored_first: tuple[MicroBatch, ...] = ()
    """Micro-batches to score without gradient before training on `micro_batches`. They contain the
    segments of split trajectories that the sequence mask may drop, because the mask depends on the
    whole trajectory (`keel.rl.offpolicy.GapTotals`). All ranks have the same number."""
    signal: bool = True
    """True if the loss of the whole optimizer step has a gradient, because at least one group on
    any rank has a nonzero advantage or a KL term."""

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
