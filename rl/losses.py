"""The training losses: the GRPO loss from section 3.1 of DeepSeek-V3.2 (2025) and the
log-likelihood loss.

A step can be split over several calls. Each call returns a partial loss, and the partial losses add
up to the loss of the whole step.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from keel.rl.checks import (
    require,
    require_log_probs,
    require_rows,
    require_sequences,
)
from keel.rl.kl import BOUND, clamp_log_ratio, k3, unbiased_k3
from keel.rl.metrics import Max, Mean, Metric, Sum
from keel.rl.offpolicy import off_policy_sequence_mask

KL = Literal["unbiased_k3", "k3"]
_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "unbiased_k3": unbiased_k3,
    "k3": lambda logp, logp_old, logp_ref: k3(logp, logp_ref),
}
_FAR = 0.1
"""`mismatch/ratio_outside_fraction` counts ratios that differ from 1 by more than this value."""


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """The partial loss returned by one call to a loss function, along with its metrics."""

    loss: Tensor
    """Scalar loss with gradient."""
    totals: Tensor
    """Accumulated values of all metrics in the order of `kinds`, float64 on the loss's device. A
    mean has two: a sum and a count."""
    kinds: Mapping[str, type[Mean] | type[Sum] | type[Max]]
    """Type of each metric."""

    @property
    def metrics(self) -> dict[str, Metric]:
        """This call's metrics, to be merged with the metrics of other calls. Read them after the
        backward pass, because reading them synchronizes with the device."""
        numbers = (float(number) for number in self.totals.cpu())
        return {
            name: Mean(next(numbers), next(numbers))
            if issubclass(kind, Mean)
            else kind(next(numbers))
            for name, kind in self.kinds.items()
        }


def grpo_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    sequence: Tensor,
    *,
    sequence_tokens: Tensor,
    total_sequences: int,
    logp_ref: Tensor | None = None,
    kl_coef: float | Tensor = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mask_delta: float | None = None,
    kl: KL = "unbiased_k3",
    sequence_weight: Tensor | None = None,
    sequence_gap: Tensor | None = None,
) -> LossOutput:
    """Compute the GRPO loss (DeepSeek-V3.2, 2025, Eq. 5 and 7–9), or a part of it if the step is
    split over several calls.

        −1/B Σ_i w_i/|o_i| Σ_t [ min(r Â_i, clip(r, 1−ε_low, 1+ε_high) Â_i) · M_i − β_t · KL_t ]

    with r = π_θ/π_old per token, M from `off_policy_sequence_mask` and KL from `keel.rl.kl`. M
    applies only to the first term, not to the KL term or the denominators.

    Shapes (R sampled tokens of S sequences):
        logp, logp_old, advantage, logp_ref   [R] float32 or float64, natural-log probabilities
        sequence                              [R] int64, 0 … S−1, in any order
        sequence_tokens                       [S] integer, |o_i|: all sampled tokens of the sequence
        total_sequences                       B, sequences in the whole optimizer step
        kl_coef                               β, a number, a scalar tensor or [R]; must be 0 if
                                              `logp_ref` is None
        mask_delta                            δ in nats per token; None: M = 1
        sequence_weight                       [S] w, 1 on average over the step; None: all ones
        sequence_gap                          [S] float64, mean of log π_old − log π_θ over all
                                              tokens of a sequence with tokens in other calls
                                              (`keel.rl.offpolicy.GapTotals`); NaN for a sequence
                                              that is complete here, or cannot be masked. None: all
                                              NaN

    Eq. 5 takes the mean over the sequences in each group, and then the mean over groups. If all
    groups have the same size, this is the mean over all sequences. Otherwise w_i = B / (n G_i),
    where the step has n groups and the group of sequence i has G_i sequences
    (`keel.rl.packing.plan_packing`).

    Both denominators are global, so partial losses and gradients add up no matter how a step is
    split across ranks, micro-batches and segments. With `mask_delta`, a sequence with a negative
    advantage must be passed in one call or together with its `sequence_gap`, because M depends on
    the whole sequence. R = 0 gives a loss of 0. The advantage may vary within a sequence, as in the
    paper (Â_{i,t}).

    Gradient flows to `logp` only. NaN and infinities in `logp_ref` have no effect where β = 0, and
    neither does an infinite log-ratio of a clipped token or of a sequence with M = 0, unless β > 0
    there. All other NaN and infinite values propagate to the loss, so that errors aren't hidden.

    Metrics:
        loss                              this call's part of the loss
        kl/ref                            the chosen estimator, where `logp_ref` is not NaN
        mismatch/kl                       k3 of π_old against π_θ
        mismatch/logp_abs                 |log π_θ − log π_old|
        mismatch/ratio_mean, ratio_max    r
        mismatch/ratio_outside_fraction   ratios outside [0.9, 1.1]
        mask/sequence_fraction            masked sequences, weighted as in the loss and by the
                                          fraction of the sequence's tokens in this call
        mask/logp_gap_max                 largest mean of log π_old − log π_θ over a sequence that
                                          is complete here, at least 0; only with `mask_delta`
        clip/fraction                     tokens without gradient because of the clip

    Raises `ValueError` if an argument is invalid. The error names the argument and, on the CPU, the
    row (see `keel.rl.checks`).
    """
    require(0 <= clip_low <= 1, f"clip_low = {clip_low}: must be in [0, 1]")
    require(clip_high >= 0, f"clip_high = {clip_high}: must not be negative")
    require(kl in _ESTIMATORS, f"kl = {kl!r}: must be one of {', '.join(_ESTIMATORS)}")
    require_log_probs(logp, logp_old=logp_old, advantage=advantage)
    _check_sequences(sequence, advantage, sequence_tokens, total_sequences)
    weight_S = _sequence_weights(sequence_weight, sequence_tokens, logp)
    if isinstance(kl_coef, Tensor) and kl_coef.ndim == 0:
        kl_coef = kl_coef.expand_as(logp)
    _check_kl(logp, logp_ref, kl_coef)

    logp_old, advantage = logp_old.detach(), advantage.detach()
    keep = torch.ones_like(sequence, dtype=torch.bool)
    if mask_delta is not None:
        keep = off_policy_sequence_mask(
            logp,
            logp_old,
            advantage,
            sequence,
            num_sequences=len(sequence_tokens),
            delta=mask_delta,
            sequence_gap=sequence_gap,
        )
        _check_complete(sequence_tokens, sequence, advantage, sequence_gap)
    surrogate, clipped = _surrogate(logp - logp_old, advantage, keep, clip_low, clip_high)
    penalty = torch.zeros_like(logp)
    if logp_ref is not None:
        coef = kl_coef.detach() if isinstance(kl_coef, Tensor) else torch.full_like(logp, kl_coef)
        used = (torch.where(coef > 0, x, 0.0) for x in (logp, logp_old, logp_ref.detach()))
        penalty = coef * _ESTIMATORS[kl](*used)
    weight = weight_S[sequence] / (sequence_tokens[sequence].to(logp.dtype) * total_sequences)
    loss = (weight * (penalty - surrogate)).sum()

    totals, kinds = _grpo_metrics(
        *(logp, logp_old, logp_ref, sequence, sequence_tokens, weight_S, loss, keep, clipped),
        estimator=_ESTIMATORS[kl],
        masked=mask_delta is not None,
    )
    return LossOutput(loss, totals, kinds)


@torch.no_grad()
def _grpo_metrics(
    logp: Tensor,
    logp_old: Tensor,
    logp_ref: Tensor | None,
    sequence: Tensor,
    sequence_tokens: Tensor,
    weight_S: Tensor,
    loss: Tensor,
    keep: Tensor,
    clipped: Tensor,
    *,
    estimator: Callable[[Tensor, Tensor, Tensor], Tensor],
    masked: bool,
) -> tuple[Tensor, dict[str, type[Mean] | type[Sum] | type[Max]]]:
    """Compute the metrics of `grpo_loss`, as the totals and kinds of `LossOutput`."""
    everywhere = torch.ones_like(keep)
    known = ~everywhere if logp_ref is None else ~logp_ref.isnan()
    reference = logp if logp_ref is None else torch.where(known, logp_ref, logp)
    dropped_S = sequence.new_zeros(len(sequence_tokens)).index_add_(0, sequence, (~keep).long())
    ratio = (logp - logp_old).clamp(-BOUND, BOUND).exp()
    gap = (logp_old - logp).double()
    zeros_S = gap.new_zeros(len(sequence_tokens))
    count_S = zeros_S.index_add(0, sequence, torch.ones_like(gap))
    fraction_S = count_S / sequence_tokens
    gap_S = zeros_S.index_add(0, sequence, gap) / count_S.clamp(min=1)
    gap_S = torch.where(fraction_S < 1, 0.0, gap_S)
    far = (ratio < 1 - _FAR) | (ratio > 1 + _FAR)
    fraction_weight_S = (fraction_S * weight_S).double()
    ratio_max = torch.cat([ratio, ratio.new_zeros(1)]).amax().double()
    gap_max = torch.cat([gap_S, zeros_S.new_zeros(1)]).amax()
    means = {
        "kl/ref": _total(estimator(logp, logp_old, reference), known),
        "mismatch/kl": _total(k3(logp_old, logp), everywhere),
        "mismatch/logp_abs": _total((logp - logp_old).abs(), everywhere),
        "mismatch/ratio_mean": _total(ratio, everywhere),
        "mismatch/ratio_outside_fraction": _total(far, everywhere),
        "mask/sequence_fraction": (
            (fraction_weight_S * (dropped_S > 0)).sum(),
            fraction_weight_S.sum(),
        ),
        "clip/fraction": _total(clipped, everywhere),
    }
    extremes = [ratio_max, gap_max] if masked else [ratio_max]
    totals = torch.stack([loss.double(), *extremes, *chain(*means.values())])
    kinds = {
        "loss": Sum,
        "mismatch/ratio_max": Max,
        **({"mask/logp_gap_max": Max} if masked else {}),
        **dict.fromkeys(means, Mean),
    }
    return totals, kinds


def _surrogate(
    log_ratio: Tensor, advantage: Tensor, keep: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return min(r Â, clip(r) Â) · M and a mask of the tokens where the clip is active, both [R].

    The clip is active where r is above the range and Â > 0, or below it and Â < 0. Excluded tokens
    are removed before the exponential instead of being multiplied by 0 afterwards, so that an
    infinite log-ratio at one token cannot reach the gradients of the others. NaN counts as not
    clipped, so it propagates to the loss.
    """
    with torch.no_grad():
        ratio = log_ratio.clamp(-BOUND, BOUND).exp()
        above = (advantage > 0) & (ratio > 1 + clip_high)
        below = (advantage < 0) & (ratio < 1 - clip_low)
        clipped = keep & (above | below)
        edge = ratio.clamp(1 - clip_low, 1 + clip_high)
        live = keep & ~clipped
    ratio = clamp_log_ratio(torch.where(live, log_ratio, 0.0)).exp()
    return torch.where(keep, torch.where(live, ratio, edge) * advantage, 0.0), clipped


def _total(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(counted, values.double(), 0.0).sum(), counted.sum().double()


def _check_sequences(
    sequence: Tensor, advantage: Tensor, sequence_tokens: Tensor, total_sequences: int
) -> None:
    require(
        sequence_tokens.ndim == 1 and sequence_tokens.dtype in (torch.int64, torch.int32),
        f"sequence_tokens is {sequence_tokens.dtype} {list(sequence_tokens.shape)}: must be int64 "
        "or int32, [S]",
    )
    require(
        total_sequences >= max(1, len(sequence_tokens)),
        f"total_sequences = {total_sequences}: must be at least 1 and count the "
        f"{len(sequence_tokens)} sequences of this call",
    )
    require_sequences(sequence, advantage, len(sequence_tokens))
    require_rows("sequence_tokens", sequence_tokens, sequence_tokens > 0, "must be above 0")
    if sequence.is_cpu:
        present = torch.bincount(sequence, minlength=len(sequence_tokens))
        require_rows(
            "sequence_tokens",
            sequence_tokens,
            sequence_tokens >= present,
            "less than the number of its tokens in this call",
        )


def _sequence_weights(weight: Tensor | None, sequence_tokens: Tensor, logp: Tensor) -> Tensor:
    """Validate `sequence_weight` [S] and convert it to the dtype of `logp`. Returns ones if it is
    None."""
    if weight is None:
        return torch.ones_like(sequence_tokens, dtype=logp.dtype)
    require(
        weight.shape == sequence_tokens.shape and weight.is_floating_point(),
        f"sequence_weight is {weight.dtype} {list(weight.shape)}: must be floating point, "
        f"{list(sequence_tokens.shape)}",
    )
    fits = weight.isfinite() & (weight >= 0)
    require_rows("sequence_weight", weight, fits, "must be finite and not negative")
    return weight.detach().to(logp.dtype)


def _check_complete(
    sequence_tokens: Tensor, sequence: Tensor, advantage: Tensor, sequence_gap: Tensor | None
) -> None:
    if sequence.is_cpu:
        present = torch.bincount(sequence, minlength=len(sequence_tokens))
        complete = present[sequence] == sequence_tokens[sequence]
        known = False if sequence_gap is None else ~sequence_gap[sequence].isnan()
        require_rows(
            "sequence",
            sequence,
            complete | known | (advantage >= 0),
            "has a negative advantage and tokens in other calls: mask_delta needs its sequence_gap",
        )


def _check_kl(logp: Tensor, logp_ref: Tensor | None, kl_coef: float | Tensor) -> None:
    if isinstance(kl_coef, Tensor):
        require_log_probs(logp, kl_coef=kl_coef)
        valid = (kl_coef >= 0) & kl_coef.isfinite()
        require_rows("kl_coef", kl_coef, valid, "must be finite and not negative")
    else:
        require(0 <= kl_coef < math.inf, f"kl_coef = {kl_coef}: must be finite and not negative")
    if logp_ref is not None:
        require_log_probs(logp, logp_ref=logp_ref)
    else:
        # The only value check that synchronises with a GPU: silently omitting the KL is worse.
        used = bool((kl_coef > 0).any()) if isinstance(kl_coef, Tensor) else kl_coef > 0
        require(not used, "logp_ref is None, but kl_coef is above 0: pass it, or set kl_coef to 0")


def nll_loss(
    logp: Tensor,
    sequence: Tensor,
    *,
    sequence_tokens: Tensor,
    total_sequences: int,
    sequence_weight: Tensor | None = None,
) -> LossOutput:
    """Compute the negative mean log-likelihood, or a part of it if the step is split over several
    calls.

        −1/B Σ_i w_i/|o_i| Σ_t log π_θ(o_{i,t})

    With w_i = |o_i| B / Σ_j |o_j|, this is the mean over all tokens in the step, as in transformers
    and TRL. With w_i = 1, every conversation has the same weight, regardless of its length.

    Shapes (R learned tokens of S conversations, which may have more tokens in other calls):
        logp              [R] float32 or float64, natural-log probabilities
        sequence          [R] int64, 0 … S−1, in any order
        sequence_tokens   [S] integer, |o_i|: all learned tokens of the conversation
        total_sequences   B, conversations in the whole optimizer step
        sequence_weight   [S] w, 1 on average over the step; None: all ones

    The denominators are global, so partial losses and gradients add up no matter how a step is
    split. R = 0 gives a loss of 0. The metrics are `loss` and `nll`, the unweighted mean of −log p
    over tokens, in nats. Raises `ValueError` if an argument is invalid.
    """
    require_log_probs(logp)
    _check_sequences(sequence, torch.zeros_like(logp), sequence_tokens, total_sequences)
    weight_S = _sequence_weights(sequence_weight, sequence_tokens, logp)
    weight = weight_S[sequence] / (sequence_tokens[sequence].to(logp.dtype) * total_sequences)
    loss = -(weight * logp).sum()
    with torch.no_grad():
        count = torch.full_like(loss, len(logp)).double()
        totals = torch.stack([loss.double(), -logp.double().sum(), count])
    return LossOutput(loss, totals, {"loss": Sum, "nll": Mean})
