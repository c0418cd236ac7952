"""Trajectories that are split over micro-batches and ranks: how far each, as a whole, is from the
policy. The sequence mask must know it before any of their segments is trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from keel.rl.metrics import Max, Metric
from keel.rl.offpolicy import GapTotals
from keel.rl.packing import MicroBatch, TrainBatch
from keel.trainer.engine.policy import Inputs

Scored = Callable[[MicroBatch], tuple[Inputs, Tensor]]


class SplitGaps:
    """Means of log π_old − log π_θ of the P trajectories of an optimizer step that are split over
    micro-batches and ranks. With P = 0 there is nothing to do, and no collective."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        self._totals = GapTotals(count, device)
        self._before_P = torch.full((count,), torch.nan, dtype=torch.float64, device=device)
        """What the sequence mask goes by; NaN of a trajectory that it cannot drop."""

    @staticmethod
    def begun(batch: TrainBatch, device: torch.device, scored: Scored) -> SplitGaps:
        """Of an optimizer step that is about to begin."""
        gaps = SplitGaps(batch.split_sequences, device)
        gaps.score(batch.scored_first, scored)
        return gaps

    def score(self, batches: Sequence[MicroBatch], scored: Scored) -> None:
        """Take the means before any training. `batches`: equally many on all ranks; `scored` gives
        one of them back with its [R] log-probabilities."""
        if batches:
            for batch in batches:
                self.add(*scored(batch))
            self._before_P = self._means()
            self._totals = GapTotals(self._count, self._before_P.device)

    def add(self, inputs: Inputs, logp: Tensor) -> None:
        """Count the [R] sampled tokens of a micro-batch in."""
        # Every rank of its sequence-parallel group has the same.
        if inputs.split_S is not None and inputs.part.rank == 0:
            self._totals.add(logp, inputs.logp_old_R, inputs.split_S[inputs.sequence_R])

    def of(self, inputs: Inputs) -> Tensor | None:
        """[S] `keel.rl.losses.grpo_loss`'s `sequence_gap` of a micro-batch."""
        if inputs.split_S is None:
            return None
        known = self._before_P[inputs.split_S.clamp(min=0)]
        return torch.where(inputs.split_S < 0, torch.nan, known)

    def metrics(self) -> dict[str, Metric]:
        """The largest mean over all micro-batches counted in; the loss sees parts of them."""
        if not self._count:
            return {}
        return {"mask/logp_gap_max": Max(float(self._means().clamp(min=0).amax()))}

    def _means(self) -> Tensor:
        dist.all_reduce(self._totals.sums_2P)
        return self._totals.means()
