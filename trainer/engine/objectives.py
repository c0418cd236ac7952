"""What a micro-batch contributes to the loss, by what it is for; and trajectories of several
micro-batches, for the sequence mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from keel.configs.schema import AlgorithmConfig
from keel.rl.losses import LossOutput, grpo_loss
from keel.rl.metrics import Max, Mean, Metric
from keel.rl.offpolicy import GapTotals
from keel.rl.packing import Loss, MicroBatch, TrainBatch
from keel.rl.supervised.loss import NllOutput, nll_loss
from keel.trainer.engine.policy import Inputs

Scored = Callable[[MicroBatch], tuple[Inputs, Tensor, Tensor]]


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
        one of them back with its [R] log-probabilities, before anything else."""
        if batches:
            for batch in batches:
                self.add(*scored(batch)[:2])
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


def grpo_share(
    batch: MicroBatch,
    inputs: Inputs,
    logp: Tensor,
    reference: Tensor | None,
    total_sequences: int,
    algorithm: AlgorithmConfig,
    split: SplitGaps,
) -> LossOutput:
    """Of trajectories. `logp` [R] and the reference policy's, of whole micro-batches."""
    used = reference is not None or batch.kl_coef_N.any()
    return grpo_loss(
        logp,
        inputs.logp_old_R,
        inputs.advantage_R,
        inputs.sequence_R,
        sequence_tokens=inputs.sequence_tokens_S,
        total_sequences=total_sequences,
        logp_ref=reference,
        # Coefficients on a GPU would be looked at there if there is no reference.
        kl_coef=inputs.kl_coef_R if used else 0.0,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        mask_delta=algorithm.mask_delta,
        kl=algorithm.kl,
        sequence_weight=inputs.sequence_weight_S,
        sequence_gap=split.of(inputs),
    )


def nll_share(
    batch: MicroBatch, inputs: Inputs, logp: Tensor, _: object, total_sequences: int, *rest: object
) -> NllOutput:
    """Of conversations that are given."""
    return nll_loss(
        logp,
        inputs.sequence_R,
        sequence_tokens=inputs.sequence_tokens_S,
        total_sequences=total_sequences,
        sequence_weight=inputs.sequence_weight_S,
    )


def looked_at(looked: Tensor) -> dict[str, Metric]:
    """`indexer/held` and `sampling/kept_mass` of the [4] that
    `keel.trainer.engine.policy.PolicyNetwork` returns, where it has looked: the share of attention
    that the top k hold, a mean over tokens with more than k before them and layers; and a mean over
    tokens of what the policy gives to their sampling masks."""
    held, queries, mass, tokens = looked.tolist()
    found: dict[str, Metric] = {}
    if queries:
        found["indexer/held"] = Mean(held, queries)
    if tokens:
        found["sampling/kept_mass"] = Mean(mass, tokens)
    return found


SHARES: Mapping[Loss, Callable[..., Any]] = {"grpo": grpo_share, "nll": nll_share}
