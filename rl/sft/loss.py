"""The loss of supervised fine-tuning, as shares that add up like those of `keel.rl.losses`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keel.rl.checks import checked_weight, require, require_log_probs, require_sequences
from keel.rl.metrics import Mean, Metric, Sum


@dataclass(frozen=True, slots=True, eq=False)
class NllOutput:
    """A share of the loss, and what was seen while computing it."""

    loss: Tensor
    """Scalar; carries the gradient."""
    totals: Tensor
    """[3] float64 on the loss's device: the loss, the sum of −log p, the tokens."""

    @property
    def metrics(self) -> dict[str, Metric]:
        """`loss`, and `nll`, the mean over tokens whatever their weight, in nats. Read them after
        the backward pass: reading waits for the device."""
        loss, total, count = (float(number) for number in self.totals.cpu())
        return {"loss": Sum(loss), "nll": Mean(total, count)}


def nll_loss(
    logp: Tensor,
    sequence: Tensor,
    *,
    sequence_tokens: Tensor,
    total_sequences: int,
    sequence_weight: Tensor | None = None,
) -> NllOutput:
    r"""This part's share of the negated mean log-likelihood.

        −1/B Σ_i w_i/|o_i| Σ_t log π_θ(o_{i,t})

    With w_i = |o_i| B / Σ_j |o_j| that is the mean over the tokens of the step, which is what
    transformers and TRL call the loss; with w_i = 1 the mean over conversations of each one's mean.

    Shapes (N learned tokens of S conversations, some of whose tokens may be in other calls):
        logp              [N] float32 or float64, natural-log probabilities
        sequence          [N] int64, 0 … S−1, in any order
        sequence_tokens   [S] integer, |o_i|: all learned tokens of the conversation
        total_sequences   B, conversations in the whole optimizer step
        sequence_weight   [S] w, 1 on average over the step; None: 1 for each

    The denominators are global, so shares and gradients of any split of a step add up. N = 0 gives
    a loss of 0. Raises `ValueError` naming the argument.
    """
    require_log_probs(logp)
    require_sequences(sequence, torch.zeros_like(logp), len(sequence_tokens))
    require(
        total_sequences >= max(1, len(sequence_tokens)),
        f"total_sequences = {total_sequences}: must be at least 1 and count the "
        f"{len(sequence_tokens)} sequences given here",
    )
    weight_S = checked_weight(sequence_weight, sequence_tokens, logp)
    weight = weight_S[sequence] / (sequence_tokens[sequence].to(logp.dtype) * total_sequences)
    loss = -(weight * logp).sum()
    with torch.no_grad():
        count = torch.full_like(loss, len(logp)).double()
        totals = torch.stack([loss.double(), -logp.double().sum(), count])
    return NllOutput(loss, totals)
