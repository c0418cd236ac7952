"""KL estimators against the exact KL, by enumeration of a vocabulary."""

import math

import pytest
import torch
from torch import Tensor

from keel.rl.kl import BOUND, clamp_log_ratio, k3, unbiased_k3

POLICIES = range(5)


def policies(seed: int, vocabulary: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of π_θ (to differentiate), log π_old and log π_ref over a vocabulary."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocabulary, generator=rng, dtype=torch.float64) * 1.5
    logp_old, logp_ref = logits[1:].log_softmax(-1)
    return logits[0].clone().requires_grad_(), logp_old, logp_ref


def kl_and_gradient(theta: Tensor, logp_ref: Tensor) -> tuple[Tensor, Tensor]:
    logp = theta.log_softmax(-1)
    kl = (logp.exp() * (logp - logp_ref)).sum()
    return kl.detach(), torch.autograd.grad(kl, theta)[0]


@pytest.mark.parametrize("seed", POLICIES)
def test_unbiased_k3_is_unbiased_off_policy(seed: int) -> None:
    theta, logp_old, logp_ref = policies(seed)
    logp = theta.log_softmax(-1)
    expected = (logp_old.exp() * unbiased_k3(logp, logp_old, logp_ref)).sum()
    kl, gradient = kl_and_gradient(theta, logp_ref)
    torch.testing.assert_close(expected.detach(), kl)
    torch.testing.assert_close(torch.autograd.grad(expected, theta)[0], gradient)


@pytest.mark.parametrize("seed", POLICIES)
def test_k3_is_unbiased_only_in_value(seed: int) -> None:
    theta, _, logp_ref = policies(seed)
    logp = theta.log_softmax(-1)
    expected = (logp.detach().exp() * k3(logp, logp_ref)).sum()
    kl, gradient = kl_and_gradient(theta, logp_ref)
    torch.testing.assert_close(expected.detach(), kl)
    (actual,) = torch.autograd.grad(expected, theta)
    # Its expectation is π_θ − π_ref, the gradient of the reverse KL.
    torch.testing.assert_close(actual, (logp.exp() - logp_ref.exp()).detach())
    assert (actual - gradient).norm() > 0.01 * gradient.norm()


@pytest.mark.parametrize("log_rho", [-1000.0, -25.0, -19.0, 14.0, 18.0, 19.9, 20.1, 30.0, 1000.0])
def test_large_kl_keeps_its_gradient_in_float32(log_rho: float) -> None:
    logp = torch.tensor([-2.0], requires_grad=True)
    logp_old, logp_ref = torch.tensor([-2.5]), torch.tensor([-2.0 + log_rho])
    value = unbiased_k3(logp, logp_old, logp_ref)
    value.sum().backward()
    assert value.isfinite().all()
    assert value.item() > 0
    assert logp.grad.item() == pytest.approx(-math.exp(0.5) * log_rho, rel=1e-5)


@pytest.mark.parametrize("log_ratio", [-1000.0, -21.0, 21.0, 1000.0])
def test_extreme_ratios_are_bounded_with_gradient(log_ratio: float) -> None:
    logp = torch.tensor([-3.0], requires_grad=True)
    value = unbiased_k3(logp, torch.tensor([-3.0 - log_ratio]), torch.tensor([-1.0]))
    value.sum().backward()
    ratio = math.exp(math.copysign(BOUND, log_ratio))
    assert value.item() == pytest.approx(ratio * (math.exp(2) - 2 - 1), rel=1e-5)
    assert logp.grad.item() == pytest.approx(-2 * ratio, rel=1e-5)


@pytest.mark.parametrize("gap", [25.0, 1000.0])
def test_k3_gradient_at_large_distance(gap: float) -> None:
    logp = torch.tensor([-gap - 1], requires_grad=True)
    value = k3(logp, torch.tensor([-1.0]))
    value.sum().backward()
    assert value.item() == pytest.approx(math.exp(BOUND) - gap - 1, rel=1e-6)
    assert logp.grad.item() == pytest.approx(1 - math.exp(BOUND), rel=1e-6)


def test_small_kl_keeps_digits_and_sign() -> None:
    log_rho = torch.tensor([1e-4, -1e-4, 3e-4])
    values = k3(torch.zeros(3), log_rho)
    torch.testing.assert_close(values, log_rho**2 / 2, rtol=2e-3, atol=0)
    logp = torch.linspace(-8, 0, 5001)
    for step in (0.0, 1e-7, 1e-6, 1e-5, -1e-7, -1e-6, -1e-5):
        assert (k3(logp, logp + step) >= 0).all()
        assert (unbiased_k3(logp, logp + 0.3, logp + step) >= 0).all()


def test_bounded_is_exact_inside_and_propagates_nan() -> None:
    inside = torch.linspace(-BOUND, BOUND, 1001)
    assert torch.equal(clamp_log_ratio(inside), inside)
    huge = torch.tensor([-1e30, 1e30])
    assert clamp_log_ratio(huge).tolist() == [-BOUND, BOUND]
    invalid = torch.tensor([float("nan"), float("inf"), -float("inf")])
    assert clamp_log_ratio(invalid).isnan().all()
