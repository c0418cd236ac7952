"""Which completions are too far from the policy to learn from."""

from __future__ import annotations

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
) -> Tensor:
    r"""The sequence mask M. DeepSeek-V3.2 (2025), Eq. 9.

        M_i = 0  iff  Â_i < 0  and  mean_t(log π_old − log π_θ) > δ

    A bad completion that the policy has already left (or that the trainer sees otherwise than the
    engine did) is dropped; a good one never is. The comparison is strict and carries no gradient.

    Shapes: `logp`, `logp_old`, `advantage` [N] over sampled tokens; `sequence` [N] int64 says whose
    token it is, in any order. Returns bool [N], True = keep: the same for all tokens of a sequence
    that has one advantage. Where its tokens differ in theirs (Â_{i,t}, as in the paper), only those
    below 0 are dropped. The mean runs over all tokens given, so a trajectory of several segments
    must come whole. It is summed in float64 and compared in the dtype of the gap.

    An infinite gap (π_θ = 0 at a sampled token) drops a bad completion like any gap above δ. A NaN
    gap never does, so that it reaches the loss and is seen there.

    Raises `ValueError` naming the argument, and on the CPU the row (see `keel.rl.checks`).
    """
    require_log_probs(logp, logp_old=logp_old, advantage=advantage)
    require_sequences(sequence, advantage, num_sequences)
    require(delta == delta, "delta is NaN: must be a number of nats per token")

    gap = logp_old.detach() - logp.detach()
    exact, gap = gap.dtype, gap.double()
    total_S = gap.new_zeros(num_sequences).index_add_(0, sequence, gap)
    count_S = gap.new_zeros(num_sequences).index_add_(0, sequence, torch.ones_like(gap))
    # Rounded first: 0.1 in float32 is above 0.1 in float64, and would not count as equal to δ.
    far_S = (total_S / count_S).to(exact) > delta
    return ~((advantage < 0) & far_S[sequence])
