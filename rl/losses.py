"""The GRPO loss of DeepSeek-V3.2 (2025), section 3.1, as shares that add up."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from keel.rl.checks import (
    checked_weight,
    require,
    require_log_probs,
    require_rows,
    require_sequences,
)
from keel.rl.kl import BOUND, bounded, k3, unbiased_k3
from keel.rl.metrics import Max, Mean, Metric, Sum
from keel.rl.offpolicy import off_policy_sequence_mask

KL = Literal["unbiased_k3", "k3"]
ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "unbiased_k3": unbiased_k3,
    "k3": lambda logp, logp_old, logp_ref: k3(logp, logp_ref),
}
FAR = 0.1
"""A ratio further from 1 than this counts in `mismatch/ratio_outside_fraction`."""


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """A share of the loss, and what was seen while computing it."""

    loss: Tensor
    """Scalar; carries the gradient."""
    totals: Tensor
    """[3 + 2·len(means)] float64 on the loss's device: the loss, the largest ratio, the largest gap
    of a sequence, and a sum and a count for each of `means`."""
    means: tuple[str, ...]
    """Names of metrics."""
    whole: bool
    """Whether there is a sequence mask, and so a gap of each sequence that is all here."""

    @property
    def metrics(self) -> dict[str, Metric]:
        """Metrics that merge over shares, in one transfer from the device.

        Read them after the backward pass: reading waits for the device.
        """
        loss, ratio_max, gap_max, *pairs = (float(number) for number in self.totals.cpu())
        means = zip(self.means, pairs[::2], pairs[1::2], strict=True)
        return {
            "loss": Sum(loss),
            "mismatch/ratio_max": Max(ratio_max),
            **({"mask/logp_gap_max": Max(gap_max)} if self.whole else {}),
            **{name: Mean(total, count) for name, total, count in means},
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
    r"""This part's share of the negated objective. DeepSeek-V3.2 (2025), Eq. 5 and 7–9.

        −1/B Σ_i w_i/|o_i| Σ_t [ min(r Â_i, clip(r, 1−ε_low, 1+ε_high) Â_i) · M_i − β_t · KL_t ]

    with r = π_θ/π_old per token, M from `off_policy_sequence_mask` and KL from `keel.rl.kl`. M
    drops the first term alone: neither the KL nor a denominator knows of it.

    Shapes (N sampled tokens of S sequences):
        logp, logp_old, advantage, logp_ref   [N] float32 or float64, natural-log probabilities
        sequence                              [N] int64, 0 … S−1, in any order
        sequence_tokens                       [S] integer, |o_i|: all sampled tokens of the sequence
        total_sequences                       B, sequences in the whole optimizer step
        kl_coef                               β, a number, a scalar tensor or [N]; `logp_ref` may be
                                              None iff it is 0
        mask_delta                            δ in nats per token; None: M = 1
        sequence_weight                       [S] w, 1 on average over the B sequences of the step;
                                              None: 1 for each
        sequence_gap                          [S] float64, the mean of log π_old − log π_θ over all
                                              tokens of a sequence that has some in other calls
                                              (`keel.rl.offpolicy.GapTotals`); NaN: it has none
                                              there, or M = 1 anyway. None: NaN for each

    Eq. 5 is a mean over groups of the mean over each group's sequences. Where all groups have the
    same size, that is the mean over all sequences; where some have lost theirs, it is w_i = B / (n
    G_i), with n groups in the step and G_i sequences left in that of i (`keel.rl.packing.pack`).

    Both denominators are global, so the shares (and gradients) of any split of a step into ranks,
    micro-batches and segments add up to those of the whole. With `mask_delta`, all tokens of a
    sequence with a negative advantage must come in one call, or with its `sequence_gap`, since M is
    about the whole sequence. N = 0 gives a loss of 0. The tokens of a sequence may differ in their
    advantage, as in the paper (Â_{i,t}).

    Gradient flows to `logp` alone. NaN and infinities are harmless where the loss does not look: in
    `logp_ref` where β = 0, and in an infinite log-ratio of a clipped token or of a sequence with
    M = 0 (unless β > 0 there). Anywhere else they make the loss NaN, on purpose.

    Metrics: `loss`; `kl/ref` (the chosen estimator, over tokens whose `logp_ref` is not NaN);
    `mismatch/kl` (k3 of π_old against π_θ), `mismatch/logp_abs`, `mismatch/ratio_mean`,
    `mismatch/ratio_max` and `mismatch/ratio_outside_fraction` (the share of ratios outside [0.9,
    1.1]); `mask/sequence_fraction` (weighted as in the loss, and by the share of a sequence's
    tokens that are here, so that several calls count it once together); `mask/logp_gap_max` (the
    largest mean of log π_old − log π_θ over a sequence that is all here, whatever its advantage:
    what δ is compared with, in nats per token, at least 0; with `mask_delta` alone);
    `clip/fraction` (tokens that the clip leaves without a gradient).

    Raises `ValueError` naming the argument, and on the CPU the row (see `keel.rl.checks`).
    """
    _check_step(sequence_tokens, total_sequences, clip_low, clip_high, kl)
    require_log_probs(logp, logp_old=logp_old, advantage=advantage)
    require_sequences(sequence, advantage, len(sequence_tokens))
    _check_sequence_tokens(sequence_tokens, sequence)
    weight_S = checked_weight(sequence_weight, sequence_tokens, logp)
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
        _check_whole(sequence_tokens, sequence, advantage, sequence_gap)
    surrogate, clipped = _surrogate(logp - logp_old, advantage, keep, clip_low, clip_high)
    penalty = _kl_penalty(logp, logp_old, logp_ref, kl_coef, ESTIMATORS[kl])
    weight = weight_S[sequence] / (sequence_tokens[sequence].to(logp.dtype) * total_sequences)
    loss = (weight * (penalty - surrogate)).sum()

    with torch.no_grad():
        everywhere = torch.ones_like(keep)
        known = ~everywhere if logp_ref is None else ~logp_ref.isnan()
        reference = logp if logp_ref is None else torch.where(known, logp_ref, logp)
        dropped_S = sequence.new_zeros(len(sequence_tokens)).index_add_(0, sequence, (~keep).long())
        ratio = (logp - logp_old).clamp(-BOUND, BOUND).exp()
        gap = (logp_old - logp).double()
        zeros_S = gap.new_zeros(len(sequence_tokens))
        count_S = zeros_S.index_add(0, sequence, torch.ones_like(gap))
        share_S = count_S / sequence_tokens
        gap_S = zeros_S.index_add(0, sequence, gap) / count_S.clamp(min=1)
        gap_S = torch.where(share_S < 1, 0.0, gap_S)
        far = (ratio < 1 - FAR) | (ratio > 1 + FAR)
        means = {
            "kl/ref": _total(ESTIMATORS[kl](logp, logp_old, reference), known),
            "mismatch/kl": _total(k3(logp_old, logp), everywhere),
            "mismatch/logp_abs": _total((logp - logp_old).abs(), everywhere),
            "mismatch/ratio_mean": _total(ratio, everywhere),
            "mismatch/ratio_outside_fraction": _total(far, everywhere),
            "mask/sequence_fraction": _weighted(dropped_S > 0, share_S * weight_S),
            "clip/fraction": _total(clipped, everywhere),
        }
        ratio_max = torch.cat([ratio, ratio.new_zeros(1)]).amax().double()
        gap_max = torch.cat([gap_S, zeros_S.new_zeros(1)]).amax()
        totals = torch.stack([loss.double(), ratio_max, gap_max, *chain(*means.values())])
    return LossOutput(loss, totals, tuple(means), whole=mask_delta is not None)


def _surrogate(
    log_ratio: Tensor, advantage: Tensor, keep: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """min(r Â, clip(r) Â) · M and where the clip is in force, both [N].

    min picks the clipped side exactly where r is above the range and Â > 0, or below it and Â < 0.
    Choosing before the exponential (and not by a product with 0) keeps an infinite log-ratio of a
    token without gradient out of everyone's gradient. A NaN compares as not clipped and stays in.
    """
    with torch.no_grad():
        ratio = log_ratio.clamp(-BOUND, BOUND).exp()
        above = (advantage > 0) & (ratio > 1 + clip_high)
        below = (advantage < 0) & (ratio < 1 - clip_low)
        clipped = keep & (above | below)
        edge = ratio.clamp(1 - clip_low, 1 + clip_high)
        live = keep & ~clipped
    ratio = bounded(torch.where(live, log_ratio, 0.0)).exp()
    return torch.where(keep, torch.where(live, ratio, edge) * advantage, 0.0), clipped


def _kl_penalty(
    logp: Tensor,
    logp_old: Tensor,
    logp_ref: Tensor | None,
    kl_coef: float | Tensor,
    estimator: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """β · KL, [N]; where β = 0 the estimator sees zeros, whatever the inputs hold."""
    if logp_ref is None:
        return torch.zeros_like(logp)
    coef = kl_coef.detach() if isinstance(kl_coef, Tensor) else torch.full_like(logp, kl_coef)
    inputs = (torch.where(coef > 0, x, 0.0) for x in (logp, logp_old, logp_ref.detach()))
    return coef * estimator(*inputs)


def _total(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of `values` where `counted`, and how many those are, as float64 scalars."""
    return torch.where(counted, values.double(), 0.0).sum(), counted.sum().double()


def _weighted(flags_S: Tensor, weight_S: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of what is flagged, and of all, as float64 scalars."""
    weights = weight_S.double()
    return (weights * flags_S).sum(), weights.sum()


def _check_step(
    sequence_tokens: Tensor,
    total_sequences: int,
    clip_low: float,
    clip_high: float,
    kl: str,
) -> None:
    require(
        sequence_tokens.ndim == 1,
        f"sequence_tokens has shape {list(sequence_tokens.shape)}: must be 1-D, [S]",
    )
    require(
        sequence_tokens.dtype in (torch.int64, torch.int32),
        f"sequence_tokens is {sequence_tokens.dtype}: must be int64",
    )
    require(
        total_sequences >= max(1, len(sequence_tokens)),
        f"total_sequences = {total_sequences}: must be at least 1 and count the "
        f"{len(sequence_tokens)} sequences given here",
    )
    require(
        0 <= clip_low <= 1,
        f"clip_low = {clip_low}: must be in [0, 1], the ratio stops at 1 − clip_low",
    )
    require(clip_high >= 0, f"clip_high = {clip_high}: must not be negative")
    if kl not in ESTIMATORS:
        nearest = difflib.get_close_matches(kl, ESTIMATORS, n=1, cutoff=0.0)[0]
        raise ValueError(f"kl = {kl!r}: did you mean {nearest!r}? Known: {', '.join(ESTIMATORS)}")


def _check_sequence_tokens(sequence_tokens: Tensor, sequence: Tensor) -> None:
    require_rows("sequence_tokens", sequence_tokens, sequence_tokens > 0, "must be above 0")
    if sequence.is_cpu:
        present = torch.bincount(sequence, minlength=len(sequence_tokens))
        require_rows(
            "sequence_tokens",
            sequence_tokens,
            sequence_tokens >= present,
            "fewer than the tokens of that sequence given here",
        )


def _check_whole(
    sequence_tokens: Tensor, sequence: Tensor, advantage: Tensor, sequence_gap: Tensor | None
) -> None:
    """What M may drop is all here, or its gap is known. On the CPU alone: on a GPU
    `keel.rl.packing.MicroBatch` has checked it."""
    if sequence.is_cpu:
        here = torch.bincount(sequence, minlength=len(sequence_tokens))
        whole = here[sequence] == sequence_tokens[sequence]
        known = False if sequence_gap is None else ~sequence_gap[sequence].isnan()
        require_rows(
            "sequence",
            sequence,
            whole | known | (advantage >= 0),
            "has tokens in other calls and a negative advantage: mask_delta needs its sequence_gap",
        )


def _check_kl(logp: Tensor, logp_ref: Tensor | None, kl_coef: float | Tensor) -> None:
    if isinstance(kl_coef, Tensor):
        require_log_probs(logp, kl_coef=kl_coef)
        require_rows(
            "kl_coef",
            kl_coef,
            (kl_coef >= 0) & kl_coef.isfinite(),
            "must be finite and not negative",
        )
    else:
        require(
            0 <= kl_coef < math.inf, f"kl_coef = {kl_coef}: must be a finite number, not negative"
        )
    if logp_ref is not None:
        require_log_probs(logp, logp_ref=logp_ref)
    else:
        # The one value check that waits for a GPU: a KL left out in silence would cost more.
        used = bool((kl_coef > 0).any()) if isinstance(kl_coef, Tensor) else kl_coef > 0
        require(not used, "logp_ref is None, but kl_coef is above 0: pass it, or set kl_coef to 0")
