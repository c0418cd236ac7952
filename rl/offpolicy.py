"""Corrections for off-policy training: the sequence mask, and a penalty for moving probability mass
out of the sampling masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from keel.rl.checks import require, require_log_probs, require_sequences
from keel.rl.metrics import Mean, Metric


def off_policy_sequence_mask(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    sequence: Tensor,
    *,
    num_sequences: int,
    delta: float,
    sequence_gap: Tensor | None = None,
) -> Tensor:
    """Compute the sequence mask M (DeepSeek-V3.2, 2025, Eq. 9).

        M_i = 0  iff  Â_i < 0  and  mean_t(log π_old − log π_θ) > δ

    A bad completion is dropped if the policy has moved away from it, or if trainer and engine
    disagree about its probability. A good completion is never dropped. The mask carries no
    gradient.

    Shapes: `logp`, `logp_old` and `advantage` are [R] over sampled tokens, and `sequence` is [R]
    int64 with the index of each token's sequence, in any order. Returns [R] bool, where True means
    that the token is kept. If all tokens in a sequence have the same advantage, they are all kept
    or all dropped. If the advantage varies (Â_{i,t}, as in the paper), only tokens with a negative
    advantage are dropped.

    The mean is taken over the tokens in this call. For a sequence with tokens in other calls, pass
    its mean in `sequence_gap` [S] float64 (from `GapTotals`), which is NaN for sequences that are
    complete here. The mean is summed in float64 and compared in the dtype of the log-probabilities.

    An infinite gap (π_θ = 0 at a sampled token) drops a bad completion just like any other gap
    above δ. A NaN gap never does, so that the NaN propagates to the loss.

    Raises `ValueError` if an argument is invalid. The error names the argument and, on the CPU, the
    row (see `keel.rl.checks`).
    """
    require_log_probs(logp, logp_old=logp_old, advantage=advantage)
    require_sequences(sequence, advantage, num_sequences)
    require(delta == delta, "delta is NaN: must be a number of nats per token")

    mean_S = GapTotals(num_sequences, logp.device).add(logp, logp_old, sequence).means()
    if sequence_gap is not None:
        require(
            sequence_gap.shape == mean_S.shape and sequence_gap.dtype == mean_S.dtype,
            f"sequence_gap is {sequence_gap.dtype} {list(sequence_gap.shape)}: must be float64, "
            f"[{num_sequences}]",
        )
        mean_S = torch.where(sequence_gap.isnan(), mean_S, sequence_gap)
    # Round first: 0.1 in float32 is above 0.1 in float64, so it would not compare equal to δ.
    far_S = mean_S.to(torch.promote_types(logp.dtype, logp_old.dtype)) > delta
    return ~((advantage < 0) & far_S[sequence])


def kept_mass_shortfall(log_mass: Tensor, *, top_p: float) -> Tensor:
    """Compute the probability mass missing from each sampling mask: max(0, log p² − log m), in
    nats.

    m = Σ_{v∈S} π_θ(v) is the total probability of the ids in the sampling mask S. Keep Sampling
    Mask compares policies only within S, so the ratios, the clip and the sequence mask don't show
    how much probability later policies move out of S. Added to the loss as a penalty, with the
    weights of Eq. 5, the shortfall keeps the policy within S without constraining it there. This
    penalty is not part of DeepSeek-V3.2.

    Top-p sampling ensures m ≥ p. If top-k is also set, pass only masks that top-k did not shorten.
    With a threshold of p², the policy can move as much mass out of S as truncation removed without
    being penalized, since 1 − p² ≈ 2 (1 − p). With a threshold of p, even fresh samples would be
    penalized wherever engine and trainer round differently.

    `log_mass` is log m for each token, float32 or float64, and carries the gradient. NaN
    propagates. Raises `ValueError` if an argument is invalid.
    """
    require(log_mass.ndim == 1, f"log_mass has shape {list(log_mass.shape)}: must be 1-D, [m]")
    require(log_mass.is_floating_point(), f"log_mass is {log_mass.dtype}: must be a float")
    require(0 < top_p <= 1, f"top_p = {top_p}: must be in (0, 1]")
    return (2 * math.log(top_p) - log_mass).clamp(min=0)


def kept_mass_penalty(
    log_mass: Tensor, weight: Tensor | None, *, coef: float, top_p: float, total_sequences: int
) -> tuple[Tensor, Tensor]:
    """Compute a micro-batch's share of the penalty on probability outside the sampling masks
    (`algorithm.kept_mass_coef`).

        c/B Σ_i w_i/|o_i| Σ_t max(0, log top_p² − log m_t)

    `log_mass` is [M], and `weight` [M] holds w_i/|o_i| times the number of tokens that each of the
    M stands for, or 0 for masks without a penalty. Without `weight`, the penalty is 0. Also returns
    the float32 totals [4] that `kept_mass_metrics` needs.
    """
    shortfall = torch.zeros_like(log_mass)
    if weight is None:
        weight = torch.zeros_like(log_mass)
    else:
        shortfall = kept_mass_shortfall(log_mass, top_p=top_p)
    with torch.no_grad():
        counted = weight > 0
        ones = torch.ones_like(log_mass)
        columns = (log_mass.exp(), ones, shortfall * counted, ones * counted)
        totals = torch.stack([column.sum() for column in columns])
    return coef / total_sequences * (weight * shortfall).sum(), totals


def kept_mass_metrics(totals: Tensor) -> dict[str, Metric]:
    """Return `sampling/kept_mass` and `sampling/mass_shortfall`. Synchronizes with the device."""
    mass, tokens, short, counted = (float(total) for total in totals.cpu())
    metrics: dict[str, Metric] = {"sampling/kept_mass": Mean(mass, tokens)} if tokens else {}
    return metrics | ({"sampling/mass_shortfall": Mean(short, counted)} if counted else {})


class GapTotals:
    """Accumulates the gap log π_old − log π_θ for the P trajectories that span several
    micro-batches or ranks, because the sequence mask needs the mean over the whole trajectory.
    `sums_2P` [2, P] float64 holds the sums and the token counts. They must be summed across
    ranks."""

    def __init__(self, count: int, device: torch.device | str = "cpu") -> None:
        self.sums_2P = torch.zeros(2, count, dtype=torch.float64, device=device)

    def add(self, logp: Tensor, logp_old: Tensor, owner: Tensor) -> GapTotals:
        """Add R tokens. `owner` [R] is the index of each token's trajectory, 0 … P−1, or −1 if the
        token belongs to none of them."""
        gap, ones = logp_old.detach() - logp.detach(), torch.ones_like(logp, dtype=torch.float64)
        more_2P = self.sums_2P.new_zeros(2, self.sums_2P.shape[1] + 1)
        more_2P[0].index_add_(0, owner + 1, gap.double())
        more_2P[1].index_add_(0, owner + 1, ones)
        self.sums_2P += more_2P[:, 1:]
        return self

    def means(self) -> Tensor:
        """Return each trajectory's mean gap in nats per token, [P] float64, with NaN for
        trajectories that have no tokens."""
        return self.sums_2P[0] / self.sums_2P[1]
