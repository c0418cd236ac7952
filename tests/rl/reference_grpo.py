"""Oracle for `keel.rl.losses`: DeepSeek-V3.2 (2025), section 3.1, one token at a time.

Written from the paper's equations with Python loops over scalars; shares no code with `rl/`.
Exponentials are not bounded, so log-ratios must be moderate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Token:
    logp: Tensor
    """log π_θ of the sampled token, a float64 scalar that requires a gradient."""
    logp_old: float
    logp_ref: float
    kl_coef: float


@dataclass(frozen=True)
class Answer:
    """o_i: all sampled tokens of one trajectory."""

    tokens: Sequence[Token]
    advantage: float


@dataclass(frozen=True)
class Result:
    loss: Tensor
    metrics: dict[str, float]


def advantages(rewards: Sequence[float]) -> list[float]:
    """Text under Eq. 6: Â_i = R_i − mean(R)."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def sequence_mask(answer: Answer, delta: float | None) -> int:
    """Eq. 9."""
    if delta is None or answer.advantage >= 0:
        return 1
    gap = 0.0
    for token in answer.tokens:
        gap += token.logp_old - token.logp.item()
    return 0 if gap / len(answer.tokens) > delta else 1


def clip(ratio: Tensor, low: float, high: float) -> Tensor:
    if ratio < low:
        return torch.tensor(low, dtype=torch.float64)
    if ratio > high:
        return torch.tensor(high, dtype=torch.float64)
    return ratio


def kl_estimate(token: Token, kl: str) -> Tensor:
    """Eq. 7, or the K3 estimator of the first GRPO."""
    rho = torch.exp(token.logp_ref - token.logp)
    estimate = rho - torch.log(rho) - 1
    if kl == "unbiased_k3":
        return torch.exp(token.logp - token.logp_old) * estimate
    assert kl == "k3"
    return estimate


def reference_grpo(
    answers: Sequence[Answer],
    *,
    groups: Sequence[int] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mask_delta: float | None = None,
    kl: str = "unbiased_k3",
) -> Result:
    """Return the negated objective over all answers of an optimizer step, with its metrics.

    `groups` has the group of each answer. Eq. 5 takes the mean over the answers in each group, and
    then the mean over groups. With None, all answers are in one group, which gives the same result
    as groups of equal size.
    """
    by_group: dict[int, list[Tensor]] = {}
    masked_by_group: dict[int, list[float]] = {}
    ratios: list[float] = []
    gaps: list[float] = []
    mismatch_kl: list[float] = []
    reference_kl: list[float] = []
    clipped: list[bool] = []
    far: list[float] = [0.0]
    for answer, group in zip(answers, groups or [0] * len(answers), strict=True):
        far.append(mean([token.logp_old - token.logp.item() for token in answer.tokens]))
        mask = sequence_mask(answer, mask_delta)
        masked_by_group.setdefault(group, []).append(mask == 0)
        inner = torch.zeros((), dtype=torch.float64)
        for token in answer.tokens:
            ratio = torch.exp(token.logp - token.logp_old)
            free = ratio * answer.advantage
            limited = clip(ratio, 1 - clip_low, 1 + clip_high) * answer.advantage
            surrogate = min(free, limited) * mask
            estimate = kl_estimate(token, kl)
            inner = inner + surrogate - token.kl_coef * estimate

            gap = token.logp_old - token.logp.item()
            ratios.append(ratio.item())
            gaps.append(abs(gap))
            mismatch_kl.append(ratio.item() + gap - 1)
            reference_kl.append(estimate.item())
            clipped.append(mask == 1 and limited.item() < free.item())
        by_group.setdefault(group, []).append(inner / len(answer.tokens))
    group_means = [torch.stack(parts).mean() for parts in by_group.values()]
    loss = -torch.stack(group_means).mean()
    return Result(
        loss=loss,
        metrics={
            "loss": loss.item(),
            "kl/ref": mean(reference_kl),
            "mismatch/kl": mean(mismatch_kl),
            "mismatch/logp_abs": mean(gaps),
            "mismatch/ratio_mean": mean(ratios),
            "mismatch/ratio_outside_fraction": mean([not 0.9 <= ratio <= 1.1 for ratio in ratios]),
            "mismatch/ratio_max": max(ratios),
            "mask/sequence_fraction": mean([mean(part) for part in masked_by_group.values()]),
            **({} if mask_delta is None else {"mask/logp_gap_max": max(far)}),
            "clip/fraction": mean(clipped),
        },
    )


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
