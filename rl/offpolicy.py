"""Completions of an older policy: which are too far to learn from, and what no ratio shows."""

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
    r"""The sequence mask M. DeepSeek-V3.2 (2025), Eq. 9.

        M_i = 0  iff  Â_i < 0  and  mean_t(log π_old − log π_θ) > δ

    A bad completion that the policy has already left (or that the trainer sees otherwise than the
    engine did) is dropped; a good one never is. The comparison is strict and carries no gradient.

    Shapes: `logp`, `logp_old`, `advantage` [N] over sampled tokens; `sequence` [N] int64 says whose
    token it is, in any order. Returns bool [N], True = keep: the same for all tokens of a sequence
    that has one advantage. Where its tokens differ in theirs (Â_{i,t}, as in the paper), only those
    below 0 are dropped. The mean runs over all tokens given, so a trajectory of several segments
    must come whole, or its mean in `sequence_gap` [S] float64 (`GapTotals`); NaN there: all of its
    tokens are here. It is summed in float64 and compared in the dtype of the gap.

    An infinite gap (π_θ = 0 at a sampled token) drops a bad completion like any gap above δ. A NaN
    gap never does, so that it reaches the loss and is seen there.

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
    # Rounded first: 0.1 in float32 is above 0.1 in float64, and would not count as equal to δ.
    far_S = mean_S.to(torch.promote_types(logp.dtype, logp_old.dtype)) > delta
    return ~((advantage < 0) & far_S[sequence])


def kept_mass_shortfall(log_mass: Tensor, *, top_p: float) -> Tensor:
    r"""How far the mass of sampling masks has sunk: max(0, log p² − log m), in nats. Keel's own.

    m = Σ_{v∈S} π_θ(v) over the whole vocabulary, where S has been sampled from. Keep Sampling Mask
    compares policies inside S alone, and so no ratio, and with it no clip and no sequence mask,
    tells what a policy of several optimizer steps later gives to ids outside S. As a penalty, with
    the weights of Eq. 5's tokens, this leaves the policy free inside S and holds it there.

    Top-p sampling made m ≥ p (of what top-k had left, where that came first: pass masks that it has
    not cut), so the policy may move about as much again out of S as sampling has left out, 1 − p² ≈
    2 (1 − p), before it costs anything. At p itself the penalty would act on fresh samples too,
    wherever engine and trainer round differently.

    `log_mass` is [m], float32 or float64, and carries the gradient. NaN stays. Raises `ValueError`
    naming the argument.
    """
    require(log_mass.ndim == 1, f"log_mass has shape {list(log_mass.shape)}: must be 1-D, [m]")
    require(log_mass.is_floating_point(), f"log_mass is {log_mass.dtype}: must be a float")
    require(0 < top_p <= 1, f"top_p = {top_p}: must be in (0, 1]")
    return (2 * math.log(top_p) - log_mass).clamp(min=0)


class GapTotals:
    """log π_old − log π_θ over the tokens of P trajectories, wherever those lie: what the sequence
    mask compares with δ, of a trajectory that is split over micro-batches and ranks.

    `sums_2P` [2, P] float64 has the sums and the numbers of tokens; those of several ranks add up.
    """

    def __init__(self, count: int, device: torch.device | str = "cpu") -> None:
        self.sums_2P = torch.zeros(2, count, dtype=torch.float64, device=device)

    def add(self, logp: Tensor, logp_old: Tensor, owner: Tensor) -> GapTotals:
        """Count [N] tokens in, of trajectories `owner`, 0 … P−1; −1: of none of them."""
        gap, ones = logp_old.detach() - logp.detach(), torch.ones_like(logp, dtype=torch.float64)
        more_2P = self.sums_2P.new_zeros(2, self.sums_2P.shape[1] + 1)
        more_2P[0].index_add_(0, owner + 1, gap.double())
        more_2P[1].index_add_(0, owner + 1, ones)
        self.sums_2P += more_2P[:, 1:]
        return self

    def means(self) -> Tensor:
        """[P] float64, nats per token; NaN of a trajectory without a token so far."""
        return self.sums_2P[0] / self.sums_2P[1]
