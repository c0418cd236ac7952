"""Off-policy corrections: the sequence mask and the mass of sampling masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from keel.rl.checks import require, require_log_probs, require_sequences


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
    r"""Compute the sequence mask M. DeepSeek-V3.2 (2025), Eq. 9.

        M_i = 0  iff  Â_i < 0  and  mean_t(log π_old − log π_θ) > δ

    Drops a bad completion that the policy has moved away from, or on which trainer and engine
    disagree; never drops a good one. The comparison is strict and carries no gradient.

    Shapes: `logp`, `logp_old`, `advantage` [N] over sampled tokens; `sequence` [N] int64, the index
    of each token's sequence, in any order. Returns bool [N], True = keep, which is constant over a
    sequence with one advantage. If the advantage varies within it (Â_{i,t}, as in the paper), only
    tokens with a negative one are dropped. The mean runs over all tokens of the call, so a
    trajectory of several segments must be complete or have its mean in `sequence_gap` [S] float64
    (`GapTotals`; NaN: complete here). It is summed in float64 and compared in the dtype of the gap.

    An infinite gap (π_θ = 0 at a sampled token) drops a bad completion like any gap above δ. A NaN
    gap never does, so that it reaches the loss.

    Raises `ValueError` naming the argument, and on the CPU the row (see `keel.rl.checks`).
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
    r"""Shortfall of probability mass in sampling masks: max(0, log p² − log m), in nats (by Keel).

    m = Σ_{v∈S} π_θ(v) over the whole vocabulary, for the sampling mask S. Keep Sampling Mask
    compares policies within S only, so neither ratios, nor the clip, nor the sequence mask see how
    much probability later policies move out of S. As a penalty, weighted like the tokens of Eq. 5,
    the shortfall holds the policy in S without constraining it there.

    Top-p sampling gives m ≥ p (after top-k, if set: pass only masks that top-k did not cut). The
    threshold p² lets the policy move as much mass out of S as sampling cut, 1 − p² ≈ 2 (1 − p),
    at no cost. A threshold of p would penalise fresh samples wherever engine and trainer round
    differently.

    `log_mass` is [m], float32 or float64, and carries the gradient; NaN propagates. Raises
    `ValueError` naming the argument.
    """
    require(log_mass.ndim == 1, f"log_mass has shape {list(log_mass.shape)}: must be 1-D, [m]")
    require(log_mass.is_floating_point(), f"log_mass is {log_mass.dtype}: must be a float")
    require(0 < top_p <= 1, f"top_p = {top_p}: must be in (0, 1]")
    return (2 * math.log(top_p) - log_mass).clamp(min=0)


class GapTotals:
    """Accumulates log π_old − log π_θ of P trajectories that span micro-batches and ranks.

    The sequence mask compares its means with δ. `sums_2P` [2, P] float64 has the sums and
    token counts, which add up over ranks.
    """

    def __init__(self, count: int, device: torch.device | str = "cpu") -> None:
        self.sums_2P = torch.zeros(2, count, dtype=torch.float64, device=device)

    def add(self, logp: Tensor, logp_old: Tensor, owner: Tensor) -> GapTotals:
        """Add [N] tokens of the trajectories `owner`, 0 … P−1, or −1 for none of them."""
        gap, ones = logp_old.detach() - logp.detach(), torch.ones_like(logp, dtype=torch.float64)
        more_2P = self.sums_2P.new_zeros(2, self.sums_2P.shape[1] + 1)
        more_2P[0].index_add_(0, owner + 1, gap.double())
        more_2P[1].index_add_(0, owner + 1, ones)
        self.sums_2P += more_2P[:, 1:]
        return self

    def means(self) -> Tensor:
        """Return [P] float64, nats per token; NaN for a trajectory without tokens."""
        return self.sums_2P[0] / self.sums_2P[1]
