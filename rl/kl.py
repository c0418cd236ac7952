"""Estimators of the KL divergence from the reference policy, computed from sampled tokens. Both use
ρ = π_ref/π_θ. In the loss, gradients flow through π_θ only."""

from torch import Tensor

BOUND = 20.0
"""Maximum absolute log-ratio, in nats, that is exponentiated. It corresponds to a ratio of 5e8."""


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp values to ±`BOUND`, with a straight-through gradient of 1. A plain clamp has no
    gradient for large values, exactly where the policy has drifted furthest. NaN and infinities
    become NaN, so that clamping doesn't hide errors."""
    return log_ratio.clamp(-BOUND, BOUND).detach() + (log_ratio - log_ratio.detach())


def k3(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Estimate KL(π_θ ‖ π_ref) per token from samples of π_θ.

        ρ − log ρ − 1,   ρ = π_ref/π_θ

    The log-ratio is clamped to ±`BOUND` only inside the exponential. The value is unbiased for
    samples of π_θ, but its gradient, d/dlogp = 1 − ρ, is not the gradient of the KL (see
    `unbiased_k3`). Schulman (2020).

    Both arguments are [R], natural-log probabilities of the sampled tokens. Returns [R], ≥ 0.
    """
    log_rho = logp_ref - logp
    # expm1 preserves a small KL, which ρ − 1 would round away in float32.
    return clamp_log_ratio(log_rho).expm1() - log_rho


def unbiased_k3(logp: Tensor, logp_old: Tensor, logp_ref: Tensor) -> Tensor:
    """Estimate KL(π_θ ‖ π_ref) per token from samples of π_old, with an unbiased gradient.

        r · (ρ − log ρ − 1),   r = π_θ/π_old,   ρ = π_ref/π_θ

    The ratio is not detached: d/dlogp = r · (logp − logp_ref), which makes the *gradient* unbiased.
    The gradient does not contain ρ, so clamping ρ to `BOUND` changes only the value. Clamping r
    also limits r in the gradient. Gradient flows to `logp` only: π_old and π_ref are constants.
    DeepSeek-V3.2 (2025), Eq. 7.

    All arguments are [R], natural-log probabilities of the sampled tokens. Returns [R], ≥ 0.
    """
    logp_old, logp_ref = logp_old.detach(), logp_ref.detach()
    ratio = clamp_log_ratio(logp - logp_old).exp()
    value = ratio * k3(logp, logp_ref)
    # r · ρ = π_ref/π_old does not depend on θ. Differentiating both factors would subtract two
    # numbers of size ρ, whose rounding error exceeds the gradient at ρ = e^20. So only the other
    # terms, r · (−log ρ − 1), are differentiated.
    rest = ratio * (logp - logp_ref - 1)
    return value.detach() + (rest - rest.detach())
