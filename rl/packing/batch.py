"""What a rank trains on: packed micro-batches, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keel.rl.types import SamplingMasks

Loss = Literal["grpo", "nll"]
"""What a micro-batch is for: `keel.rl.losses`, or `keel.rl.sft.loss`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Segments laid end to end: N tokens of S trajectories. Alignment as in `keel.rl.types`.

    Checks on the host what `keel.rl.losses.grpo_loss` does not check on a GPU.
    """

    token_ids_N: NDArray[np.int32]
    position_N: NDArray[np.int32]
    """Position inside the token's context: counts from 0 in each segment, and in one that follows
    another from that one's end."""
    segment_N: NDArray[np.int32]
    """Which segment the token belongs to. Attention crosses it only to the one that it follows."""
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
    sampling_mask: SamplingMasks | None = None
    selected_NLk: NDArray[np.int32] | None = None
    """Input-aligned; rows of −1 have the live selection of sparse attention."""
    split_S: NDArray[np.int64] | None = None
    """The number of a trajectory that has segments in other micro-batches too, among such ones of
    the step (0 … P−1); −1 for one that is all here. None: all are."""
    follows: NDArray[np.int64] | None = None
    """[segments] the earlier segment that it continues: a beginning of several trajectories, which
    trains nothing (`keel.rl.packing.prefix_sharing`); −1: none. None: none does."""
    watched: NDArray[np.int64] | None = None
    """[segments] which of those that `pack` was asked to watch it is; −1: none. None: none are."""
    loss: Loss = "grpo"

    def __post_init__(self) -> None:
        tokens, sequences = len(self.token_ids_N), len(self.sequence_tokens_S)
        for name in (*PER_TOKEN, "routes_NLK", "sampling_mask", "selected_NLk"):
            value = getattr(self, name)
            if value is not None and len(value) != tokens:
                raise ValueError(
                    f"micro-batch: {name} has {len(value)} entries for {tokens} tokens"
                )
        if tokens == 0:
            raise ValueError("micro-batch: no tokens; pad with an untrainable one")
        starts = np.flatnonzero(np.diff(self.segment_N, prepend=self.segment_N[0] - 1))
        lengths = np.diff(starts, append=tokens)
        trainable = self.trainable_N
        before = np.zeros(len(starts), np.int64)
        if self.follows is not None:
            self._check_follows(starts)
            before = np.where(self.follows >= 0, lengths[self.follows], 0)
        if (self.position_N != np.arange(tokens) - np.repeat(starts - before, lengths)).any():
            raise ValueError(
                "micro-batch: position_N must count from 0 in each segment, or from the end of the "
                "one that it follows"
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

    @property
    def shared_tokens(self) -> int:
        """Those that contexts would have more tokens, each by itself."""
        if self.follows is None:
            return 0
        lengths = np.bincount(self.segment_N)
        followed = self.follows[self.follows >= 0]
        return int(lengths[followed].sum() - lengths[np.unique(followed)].sum())

    def context_rows(self, segment: int) -> NDArray[np.int64]:
        """The tokens that a segment is the end of: of the one that it follows, then its own. Of a
        beginning, those of the first that follows it."""
        if self.follows is not None:
            followers = np.flatnonzero(self.follows == segment)
            segment = int(followers[0]) if len(followers) else segment
        own = np.flatnonzero(self.segment_N == segment)
        if self.follows is None or self.follows[segment] < 0:
            return own
        return np.concatenate([np.flatnonzero(self.segment_N == self.follows[segment]), own])

    def _check_follows(self, starts: NDArray[np.int64]) -> None:
        follows, count = self.follows, len(starts)
        assert follows is not None
        if len(follows) != count or (follows >= np.arange(count)).any() or (follows < -1).any():
            raise ValueError(f"micro-batch: follows must be {count} numbers of earlier segments")
        shared = np.unique(follows[follows >= 0])
        taught = np.add.reduceat(self.trainable_N, starts) > 0
        if taught[shared].any() or (follows[shared] >= 0).any():
            raise ValueError(
                "micro-batch: follows: a segment that others follow trains nothing and follows none"
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
    signal: bool = True
    """Whether any group of the whole optimizer step, over all ranks, has an advantage or a KL term:
    without one the loss has no gradient."""

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
