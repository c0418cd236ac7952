"""Laws of the loss: what it must do whatever the numbers."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.rl.losses import grpo_loss
from keel.rl.metrics import Max, Mean, Sum, merge
from tests.rl.batches import Batch

INF, NAN = float("inf"), float("nan")
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def one_token(
    log_ratio: float, advantage: float, *, dtype: torch.dtype = torch.float32, **knobs: Any
) -> tuple[float, float]:
    """Loss and gradient of a single sequence of a single token."""
    logp = torch.tensor([-2.0], dtype=dtype, requires_grad=True)
    loss = grpo_loss(
        logp,
        torch.tensor([-2.0 - log_ratio], dtype=dtype),
        torch.tensor([advantage], dtype=dtype),
        torch.tensor([0]),
        sequence_tokens=torch.tensor([1]),
        total_sequences=1,
        **knobs,
    ).loss
    loss.backward()
    assert logp.grad is not None
    return loss.item(), logp.grad.item()


# --- the surrogate --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_on_policy_the_gradient_is_that_of_reinforce(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, 6, generator=rng, dtype=torch.float64, requires_grad=True)
    chosen = torch.randint(6, (7,), generator=rng)
    sequence = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    tokens = torch.tensor([3, 2, 2])
    advantage = torch.randn(3, generator=rng, dtype=torch.float64)[sequence]

    logp = logits.log_softmax(-1)[torch.arange(7), chosen]
    (reinforce,) = torch.autograd.grad(
        -(advantage * logp / tokens[sequence]).sum() / 3, logits, retain_graph=True
    )
    output = grpo_loss(
        logp, logp.detach(), advantage, sequence, sequence_tokens=tokens, total_sequences=3
    )
    torch.testing.assert_close(torch.autograd.grad(output.loss, logits)[0], reinforce)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 2.0, -2 * 1.3, 0.0),  # a good token that has gained enough
        (0.5, -2.0, 2 * 0.9, 0.0),  # a bad token that has lost enough
        (1.5, -2.0, 2 * 1.5, 2 * 1.5),  # the wrong way: pulled back in full
        (0.5, 2.0, -2 * 0.5, -2 * 0.5),
        (1.2, 2.0, -2 * 1.2, -2 * 1.2),  # inside the range
        (0.95, -2.0, 2 * 0.95, 2 * 0.95),
        (7.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_clip_stops_only_what_has_gone_far_enough(ratio, advantage, loss, gradient) -> None:
    found = one_token(math.log(ratio), advantage, dtype=torch.float64, clip_low=0.1, clip_high=0.3)
    assert found == pytest.approx((loss, gradient))


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**31), LENGTHS)
def test_clipped_tokens_have_no_gradient_and_no_others_lack_one(seed, lengths) -> None:
    batch = Batch.random(seed, lengths, drift=1.0)
    output, gradient = batch.loss(kl_coef=0.0)
    ratio = (batch.logp - batch.logp_old).exp()
    clipped = ((ratio > 1.2) & (batch.advantage > 0)) | ((ratio < 0.8) & (batch.advantage < 0))
    assert torch.equal(gradient == 0, clipped)
    assert output.metrics["clip/fraction"].value == pytest.approx(clipped.double().mean().item())


def test_tokens_of_a_sequence_may_have_advantages_of_their_own() -> None:
    # Beyond the clip on either side, with either sign; mean gap 0, so the mask keeps them all.
    log_ratio = torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    logp = log_ratio.clone().requires_grad_()
    output = grpo_loss(
        logp,
        torch.zeros_like(logp),
        advantage,
        torch.zeros(4, dtype=torch.int64),
        sequence_tokens=torch.tensor([4]),
        total_sequences=1,
        mask_delta=0.1,
    )
    output.loss.backward()
    ratio = log_ratio.exp()
    assert output.loss.item() == pytest.approx(-(1.2 - ratio[1] + ratio[2] - 0.8).item() / 4)
    expected = torch.stack([torch.zeros(()), ratio[1], -ratio[2], torch.zeros(())]) / 4
    torch.testing.assert_close(logp.grad, expected)
    assert output.metrics["mask/sequence_fraction"] == Mean(0, 1)


def test_gradient_flows_to_the_policy_alone() -> None:
    batch = Batch.random(0, [2, 3])
    leaves: list[Tensor] = [
        x.clone().requires_grad_()
        for x in (batch.logp, batch.logp_old, batch.advantage, batch.logp_ref, batch.kl_coef)
    ]
    logp, logp_old, advantage, logp_ref, kl_coef = leaves
    for kl in ("unbiased_k3", "k3"):
        grpo_loss(
            *(logp, logp_old, advantage, batch.sequence),
            sequence_tokens=batch.sequence_tokens,
            total_sequences=2,
            logp_ref=logp_ref,
            kl_coef=kl_coef,
            kl=kl,
        ).loss.backward()
    assert logp.grad is not None
    assert all(leaf.grad is None for leaf in leaves[1:])


# --- the sequence mask ----------------------------------------------------------------------------


def far_and_near() -> Batch:
    """Sequence 0 is a bad answer the policy has left by 3 nats; sequence 1 a bad one it has not."""
    batch = Batch.random(1, [3, 2], drift=0.05)
    far = (batch.sequence == 0).double()
    return replace(
        batch,
        logp_old=batch.logp_old + 3 * far,
        advantage=-torch.ones_like(batch.logp),
        kl_coef=torch.full_like(batch.logp, 0.5),
    )


def test_the_mask_leaves_kl_and_denominators_alone() -> None:
    batch = far_and_near()
    far = batch.sequence == 0
    masked, gradient = batch.loss(mask_delta=2.0, clip_low=1.0)
    unmasked, gradient_unmasked = batch.loss(clip_low=1.0)
    _, gradient_kl = replace(batch, advantage=torch.zeros_like(batch.logp)).loss()
    assert masked.metrics["mask/sequence_fraction"] == Mean(1.0, 2.0)
    torch.testing.assert_close(gradient[far], gradient_kl[far])
    assert (gradient_kl[far] != 0).all()
    torch.testing.assert_close(gradient[~far], gradient_unmasked[~far])
    assert (gradient[far] != gradient_unmasked[far]).all()
    surrogate = (batch.logp - batch.logp_old).exp()[far].sum() / 3 / 2
    torch.testing.assert_close(unmasked.loss - masked.loss, surrogate)


def test_the_mask_carries_no_gradient_and_none_means_none() -> None:
    batch = far_and_near()
    just_masked, just_kept = 2.0, 10.0
    assert batch.loss(mask_delta=just_kept)[0].loss == batch.loss(mask_delta=None)[0].loss
    _, gradient = batch.loss(mask_delta=just_masked, kl_coef=0.0)
    assert gradient[batch.sequence == 0].tolist() == [0.0] * 3
    good = replace(batch, advantage=-batch.advantage)
    assert good.loss(mask_delta=just_masked)[0].metrics["mask/sequence_fraction"].value == 0


# --- shares add up --------------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), LENGTHS, st.integers(1, 4), st.booleans())
def test_any_split_gives_the_same_loss_gradient_and_metrics(seed, lengths, parts, inside) -> None:
    """Sequences over ranks and micro-batches; without the sequence mask, also tokens of a sequence
    (`inside`), as segments packed apart."""
    batch = Batch.random(seed, lengths, drift=1.0)
    knobs: dict[str, Any] = {
        "total_sequences": len(lengths) + 1,
        "mask_delta": None if inside else 0.3,
    }
    whole, gradient = batch.loss(**knobs)
    rng = torch.Generator().manual_seed(seed)
    part_of_sequence = torch.randint(parts, (len(lengths),), generator=rng)
    part = part_of_sequence[batch.sequence]
    if inside:
        part = torch.randint(parts, batch.logp.shape, generator=rng)

    loss, pieces = torch.zeros((), dtype=torch.float64), torch.zeros_like(gradient)
    metrics: list[Any] = []
    for index in range(parts):
        rows = (part == index).nonzero()[:, 0]
        share, share_gradient = batch.rows(rows).loss(**knobs)
        loss += share.loss.detach()
        pieces[rows] = share_gradient
        metrics.append(share.metrics)
    torch.testing.assert_close(loss, whole.loss.detach())
    torch.testing.assert_close(pieces, gradient)
    merged, expected = merge(metrics), whole.metrics
    for name in expected:
        if not (inside and name == "mask/sequence_fraction"):  # a sequence counts once a part
            assert merged[name].value == pytest.approx(expected[name].value, nan_ok=True)


def test_a_token_weighs_one_over_its_sequence_and_all_sequences() -> None:
    batch = Batch.random(0, [1, 4], drift=0.0)
    _, gradient = batch.loss(kl_coef=0.0, total_sequences=10)
    weight = torch.tensor([1.0, 1 / 4], dtype=torch.float64)[batch.sequence] / 10
    torch.testing.assert_close(gradient, -weight * batch.advantage)


def test_no_tokens_are_a_loss_of_zero_with_a_graph() -> None:
    hidden = torch.ones(3, requires_grad=True)
    nothing = torch.zeros(0)
    output = grpo_loss(
        hidden[:0],
        nothing,
        nothing,
        torch.zeros(0, dtype=torch.int64),
        sequence_tokens=torch.zeros(0, dtype=torch.int64),
        total_sequences=4,
        logp_ref=nothing,
        kl_coef=nothing,
        mask_delta=2.0,
    )
    output.loss.backward()
    assert output.loss.item() == 0
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [0.0] * 3
    full = Batch.random(0, [2, 3]).loss(mask_delta=2.0)[0].metrics
    assert merge([output.metrics, full]) == full


# --- NaN, infinities, extremes --------------------------------------------------------------------


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("kl", ["unbiased_k3", "k3"])
def test_the_reference_is_not_looked_at_where_beta_is_zero(poison: float, kl: str) -> None:
    batch = Batch.random(4, [3, 2, 4])
    free = batch.kl_coef == 0
    assert 0 < free.sum() < len(free)
    clean, gradient = batch.loss(kl=kl)
    poisoned = replace(batch, logp_ref=torch.where(free, poison, batch.logp_ref))
    output, found = poisoned.loss(kl=kl)
    assert output.loss == clean.loss
    assert torch.equal(found, gradient)
    # Finite once more where a scalar β of 0 says that nothing is looked at.
    assert poisoned.loss(kl=kl, kl_coef=0.0)[0].loss.isfinite()
    assert (
        not replace(batch, logp_ref=torch.full_like(batch.logp, poison)).loss()[0].loss.isfinite()
    )


def test_a_scalar_tensor_is_a_coefficient_for_all_tokens() -> None:
    batch = Batch.random(0, [3, 1, 4])
    number, gradient = batch.loss(kl_coef=0.3)
    scalar, same = batch.loss(kl_coef=torch.tensor(0.3, dtype=torch.float64))
    assert torch.equal(number.loss, scalar.loss)
    assert torch.equal(gradient, same)


def test_unknown_references_are_left_out_of_the_mean_kl() -> None:
    batch = Batch.random(4, [3, 2, 4])
    free = batch.kl_coef == 0
    poisoned = replace(batch, logp_ref=torch.where(free, NAN, batch.logp_ref))
    kl = poisoned.loss()[0].metrics["kl/ref"]
    assert isinstance(kl, Mean)
    assert kl.count == (~free).sum()
    assert math.isfinite(kl.total)


def test_an_infinite_log_ratio_under_the_sequence_mask_is_harmless() -> None:
    batch = replace(far_and_near(), kl_coef=torch.zeros(5, dtype=torch.float64))
    row = int((batch.sequence == 0).nonzero()[0])
    logp = batch.logp.clone()
    logp[row] = -INF
    clean, gradient = batch.loss(mask_delta=2.0)
    output, found = replace(batch, logp=logp).loss(mask_delta=2.0)
    assert output.loss == clean.loss
    assert torch.equal(found, gradient)
    # The KL term is not under that mask.
    beta = torch.ones_like(logp)
    assert replace(batch, logp=logp, kl_coef=beta).loss(mask_delta=2.0)[0].loss.isnan()


@pytest.mark.parametrize(
    ("field", "value", "advantage", "edge"),
    [("logp_old", -INF, 1.0, 1.2), ("logp", -INF, -1.0, 0.8)],
)
def test_an_infinite_log_ratio_of_a_clipped_token_is_harmless(
    field: str, value: float, advantage: float, edge: float
) -> None:
    batch = replace(Batch.random(0, [3], drift=0.0), advantage=torch.full((3,), advantage).double())
    changed = getattr(batch, field).clone()
    changed[1] = value
    output, gradient = replace(batch, **{field: changed}).loss(kl_coef=0.0)
    assert output.loss.item() == pytest.approx(-advantage * (2 + edge) / 3)
    assert gradient.tolist() == pytest.approx([-advantage / 3, 0.0, -advantage / 3])


@pytest.mark.parametrize(
    ("field", "value", "advantage"),
    [
        ("logp", NAN, 1.0),
        ("logp", NAN, -1.0),
        ("logp", NAN, 0.0),
        ("logp_old", NAN, 1.0),
        ("logp", -INF, 1.0),
        ("logp_old", -INF, -1.0),
    ],
)
@pytest.mark.parametrize("mask_delta", [None, 2.0])
def test_a_non_finite_token_that_counts_is_not_hidden(field, value, advantage, mask_delta) -> None:
    batch = replace(Batch.random(0, [3], drift=0.0), advantage=torch.full((3,), advantage).double())
    changed = getattr(batch, field).clone()
    changed[1] = value
    output, _ = replace(batch, **{field: changed}).loss(kl_coef=0.0, mask_delta=mask_delta)
    assert output.loss.isnan()
    assert math.isnan(output.metrics["loss"].value)


@pytest.mark.parametrize("log_ratio", [21.0, 50.0, 1000.0, 1e30])
def test_extreme_ratios_stay_finite_and_keep_their_gradient(log_ratio: float) -> None:
    largest = math.exp(20)
    # A bad token the policy has come to love: the one gradient that must not vanish.
    assert one_token(log_ratio, -1.0) == pytest.approx((largest, largest), rel=1e-6)
    assert one_token(log_ratio, 1.0) == pytest.approx((-1.2, 0.0))
    assert one_token(-log_ratio, -1.0) == pytest.approx((0.8, 0.0))
    assert one_token(-log_ratio, 1.0) == pytest.approx((-1 / largest, -1 / largest), rel=1e-6)


def test_a_large_kl_keeps_its_gradient_through_the_loss() -> None:
    for gap in (15.0, 19.0, 40.0, 300.0):
        loss, gradient = one_token(0.0, 0.0, logp_ref=torch.tensor([-2.0 + gap]), kl_coef=0.1)
        assert math.isfinite(loss)
        assert gradient == pytest.approx(-0.1 * gap, rel=1e-5)


# --- metrics --------------------------------------------------------------------------------------


def test_metrics_by_hand() -> None:
    logp = torch.tensor([-1.0, -2.0, -4.0], dtype=torch.float64, requires_grad=True)
    output = grpo_loss(
        logp,
        torch.tensor([-2.0, -2.0, -1.0], dtype=torch.float64),
        torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64),
        torch.tensor([0, 0, 1]),
        sequence_tokens=torch.tensor([2, 1]),
        total_sequences=2,
        logp_ref=torch.tensor([-1.0, -3.0, -4.0], dtype=torch.float64),
        kl_coef=0.5,
        mask_delta=2.0,
    )
    kl = math.exp(-1) + 1 - 1
    expected = {
        "loss": Sum(-(1.2 + 1.0) / 2 / 2 + 0.5 * kl / 2 / 2),
        "kl/ref": Mean(kl, 3),
        "mismatch/kl": Mean((math.e - 2) + (math.exp(-3) + 2), 3),
        "mismatch/logp_abs": Mean(1 + 0 + 3, 3),
        "mismatch/ratio_mean": Mean(math.e + 1 + math.exp(-3), 3),
        "mismatch/ratio_outside_fraction": Mean(2, 3),
        "mismatch/ratio_max": Max(math.e),
        "mask/sequence_fraction": Mean(1, 2),
        "mask/logp_gap_max": Max(3.0),  # of the second; the first has moved the other way
        "clip/fraction": Mean(1, 3),
    }
    found = output.metrics
    assert found.keys() == expected.keys()
    for name, metric in expected.items():
        assert type(found[name]) is type(metric)
        assert found[name].value == pytest.approx(metric.value)
    assert not output.totals.requires_grad
    with pytest.raises(FrozenInstanceError):
        output.loss = logp  # type: ignore[misc]


def test_a_sequence_without_tokens_here_counts_elsewhere() -> None:
    batch = Batch.random(0, [2, 3])
    extended = replace(batch, sequence_tokens=torch.tensor([2, 3, 4]))
    metrics = extended.loss(mask_delta=2.0)[0].metrics
    assert metrics["mask/sequence_fraction"] == Mean(0.0, 2.0)


def test_without_a_reference_no_kl_is_counted() -> None:
    metrics = Batch.random(0, [2, 3]).loss(logp_ref=None, kl_coef=0.0)[0].metrics
    assert metrics["kl/ref"] == Mean(0.0, 0.0)
