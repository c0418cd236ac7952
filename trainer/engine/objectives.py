"""Computes the loss and the metrics of a micro-batch for each training objective."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from keel.configs.schema import AlgorithmConfig, Config
from keel.model.torch_internals import to_device
from keel.rl.losses import LossOutput, grpo_loss, nll_loss
from keel.rl.metrics import Max, Mean, Metric
from keel.rl.offpolicy import GapTotals, kept_mass_shortfall
from keel.rl.packing import Loss, MicroBatch, TrainBatch
from keel.trainer.engine.policy import Inputs

_CUT = 4
"""A sampling mask may have been cut by top-k if it has more than 1/`_CUT` of the ids that top-k
allows. Top-k is applied before top-p, but it changes nothing where a few ids hold nearly all of the
probability."""


class SplitGaps:
    """Computes the mean of log π_old − log π_θ for each of the P trajectories that are split over
    micro-batches or ranks. The sequence mask needs these means."""

    def __init__(
        self,
        batch: TrainBatch,
        device: torch.device,
        scored: Callable[[MicroBatch], tuple[Inputs, Tensor, Tensor]],
    ) -> None:
        """Compute the means before an optimizer step. All ranks must call this together."""
        sampled = batch.micro_batches[0].loss == "grpo"
        count = self._count = batch.split_sequences if sampled else 0
        self._totals = GapTotals(count, device)
        self._before_P = torch.full((count,), torch.nan, dtype=torch.float64, device=device)
        """The means before the step, or NaN for trajectories that the mask cannot drop."""
        if batch.scored_first:
            for micro_batch in batch.scored_first:
                self.add(*scored(micro_batch)[:2])
            self._before_P = self._means()
            self._totals = GapTotals(count, device)

    def add(self, inputs: Inputs, logp: Tensor) -> None:
        # All ranks of a sequence-parallel group have the same.
        if self._count and inputs.split_S is not None and inputs.part.rank == 0:
            self._totals.add(logp, inputs.logp_old_R, inputs.split_S[inputs.sequence_R])

    def of(self, inputs: Inputs) -> Tensor | None:
        """Return the `sequence_gap` [S] of a micro-batch for `keel.rl.losses.grpo_loss`, or None if
        it has no split trajectories."""
        if inputs.split_S is None:
            return None
        gaps = self._before_P[inputs.split_S.clamp(min=0)]
        return torch.where(inputs.split_S < 0, torch.nan, gaps)

    def metrics(self) -> dict[str, Metric]:
        if not self._count:
            return {}
        return {"mask/logp_gap_max": Max(float(self._means().clamp(min=0).amax()))}

    def _means(self) -> Tensor:
        dist.all_reduce(self._totals.sums_2P)
        return self._totals.means()


def _grpo(
    batch: MicroBatch,
    inputs: Inputs,
    logp: Tensor,
    reference: Tensor | None,
    total_sequences: int,
    algorithm: AlgorithmConfig,
    split: SplitGaps,
) -> LossOutput:
    used = reference is not None or batch.kl_coef_N.any()
    return grpo_loss(
        logp,
        inputs.logp_old_R,
        inputs.advantage_R,
        inputs.sequence_R,
        sequence_tokens=inputs.sequence_tokens_S,
        total_sequences=total_sequences,
        logp_ref=reference,
        kl_coef=inputs.kl_coef_R if used else 0.0,  # a float avoids a device synchronisation
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        mask_delta=algorithm.mask_delta,
        kl=algorithm.kl,
        sequence_weight=inputs.sequence_weight_S,
        sequence_gap=split.of(inputs),
    )


def _nll(
    batch: MicroBatch, inputs: Inputs, logp: Tensor, _: object, total_sequences: int, *rest: object
) -> LossOutput:
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
    """Compute a penalty on the probability that the policy gives to ids outside the sampling masks
    (`algorithm.kept_mass_coef`).

        c/B Σ_i w_i/|o_i| Σ_t max(0, log top_p² − log m_t)

    `log_mass` [m] covers this rank's shard of the row. Masks that top-k may have cut (`_CUT`) are
    not counted, because their probability at sampling time is unknown. Returns this micro-batch's
    share of the penalty, and [4] float32 totals for `mass_metrics`.
    """
    coef, sampling, head = config.algorithm.kept_mass_coef, config.rollout.sampling, inputs.head
    weight, short = torch.zeros_like(log_mass), torch.zeros_like(log_mass)
    if coef > 0 and inputs.truncated:  # also without probes: all ranks need the same graph
        whole = _CUT * head.kept_offsets.diff()[head.probes] <= sampling.top_k
        weight = to_device(head.probe_weight * whole, log_mass.device)
        short = kept_mass_shortfall(log_mass, top_p=sampling.top_p)
    with torch.no_grad():
        counted = weight > 0
        ones = torch.ones_like(log_mass)
        columns = (log_mass.exp(), ones, short * counted, ones * counted)
        totals = torch.stack([column.sum() for column in columns])
    return coef / total_sequences * (weight * short).sum(), totals


def indexer_metrics(held: Tensor) -> dict[str, Metric]:
    """Return `indexer/held`: the share of attention on the top k keys, averaged over layers and
    over queries with more than k keys."""
    attention, queries = held.tolist()
    return {"indexer/held": Mean(attention, queries)} if queries else {}


def mass_metrics(totals: Tensor) -> dict[str, Metric]:
    mass, tokens, short, counted = totals.tolist()
    metrics: dict[str, Metric] = {"sampling/kept_mass": Mean(mass, tokens)} if tokens else {}
    return metrics | ({"sampling/mass_shortfall": Mean(short, counted)} if counted else {})


LOSSES: Mapping[Loss, Callable[..., Any]] = {"grpo": _grpo, "nll": _nll}
