"""What a micro-batch contributes to the loss, by what it is for; and trajectories of several
micro-batches, for the sequence mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from keel.configs.schema import AlgorithmConfig, Config
from keel.model.device import to_device
from keel.rl.losses import LossOutput, grpo_loss
from keel.rl.metrics import Max, Mean, Metric, Sum
from keel.rl.offpolicy import GapTotals, kept_mass_shortfall
from keel.rl.packing import Loss, MicroBatch, TrainBatch
from keel.rl.sft import NllOutput, nll_loss
from keel.trainer.engine.policy import Inputs

CUT = 4
"""Top-k comes first, and top-p takes its share of what that has left. The k likeliest hold next to
all where the likelier ones are few: sampling masks of a `CUT`-th of k are taken for whole."""
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
        """Of an optimizer step that is about to begin. Nobody has sampled what conversations that
        are given hold, so of these there are none."""
        sampled = batch.micro_batches[0].loss == "grpo"
        gaps = SplitGaps(batch.split_sequences if sampled else 0, device)
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
        if self._count and inputs.split_S is not None and inputs.part.rank == 0:
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


def counted(batch: MicroBatch) -> dict[str, Metric]:
    """What the host knows of a micro-batch by itself."""
    if batch.follows is None:
        return {}
    return {"train/shared_tokens": Sum(batch.shared_tokens)}


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


def mass_share(
    inputs: Inputs, log_mass: Tensor, total_sequences: int, config: Config
) -> tuple[Tensor, Tensor]:
    """The penalty on sunk masses of sampling masks (`algorithm.kept_mass_coef`), as a share of the
    step's loss; and [4] float32 without gradient, for `looked_at`.

        c/B Σ_i w_i/|o_i| Σ_t max(0, log top_p² − log m_t)

    log_mass: [m], of this rank's part of the row, from `PolicyNetwork`. Masks that top-k may have
    cut (`CUT`) have no part in the penalty: nobody knows what they held when they were sampled.
    """
    coef, sampling, head = config.algorithm.kept_mass_coef, config.rollout.sampling, inputs.head
    weight, short = torch.zeros_like(log_mass), torch.zeros_like(log_mass)
    if coef > 0 and inputs.truncated:  # with no probe, too: all ranks go back through the same
        known = CUT * head.kept_offsets.diff()[head.probes] <= sampling.top_k
        weight = to_device(head.probe_weight * known, log_mass.device)
        short = kept_mass_shortfall(log_mass, top_p=sampling.top_p)
    with torch.no_grad():
        counted = weight > 0
        ones = torch.ones_like(log_mass)
        columns = (log_mass.exp(), ones, short * counted, ones * counted)
        seen = torch.stack([column.sum() for column in columns])
    return coef / total_sequences * (weight * short).sum(), seen


def looked_at(held: Tensor, masses: Tensor | None = None) -> dict[str, Metric]:
    """`indexer/held` of the [2] that `keel.trainer.engine.policy.PolicyNetwork` returns: the share
    of attention that the top k hold, a mean over tokens with more than k before them and layers;
    and what `mass_share` has seen. Nothing of what there was none of. Waits for the device."""
    attention, queries = held.tolist()
    found: dict[str, Metric] = {"indexer/held": Mean(attention, queries)} if queries else {}
    if masses is not None:
        mass, tokens, short, counted = masses.tolist()
        found |= {"sampling/kept_mass": Mean(mass, tokens)} if tokens else {}
        found |= {"sampling/mass_shortfall": Mean(short, counted)} if counted else {}
    return found


LOSSES: Mapping[Loss, Callable[..., Any]] = {"grpo": grpo_share, "nll": nll_share}
