"""Laws of the GRPO loss and of its sequence mask, and their comparison with the naive oracle."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from keel.rl.losses import grpo_loss
from keel.rl.metrics import Max, Mean, Sum, merge
from keel.rl.offpolicy import kept_mass_shortfall, off_policy_sequence_mask
from tests.rl.batches import LossInputs
from tests.rl.reference_grpo import reference_grpo, sequence_mask

INF, NAN = float("inf"), float("nan")
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def one_token(
    log_ratio: float, advantage: float, *, dtype: torch.dtype = torch.float32, **knobs: Any
) -> tuple[float, float]:
    """Loss and gradient of a single sequence of a single token."""
    logp = torch.tensor([-2.0], dtype=dtype, requires_grad=True)
    logp_old = torch.tensor([-2.0 - log_ratio], dtype=dtype)
    knobs |= {"sequence_tokens": torch.tensor([1]), "total_sequences": 1}
    advantages = torch.tensor([advantage], dtype=dtype)
    loss = grpo_loss(logp, logp_old, advantages, torch.tensor([0]), **knobs).loss
    loss.backward()
    return loss.item(), logp.grad.item()


@pytest.mark.parametrize("seed", range(5))
def test_on_policy_gradient_equals_reinforce(seed: int) -> None:
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
        (1.5, 2.0, -2 * 1.3, 0.0),  # a good token above the range
        (0.5, -2.0, 2 * 0.9, 0.0),  # a bad token below the range
        (1.5, -2.0, 2 * 1.5, 2 * 1.5),  # moved the wrong way
        (0.5, 2.0, -2 * 0.5, -2 * 0.5),
        (1.2, 2.0, -2 * 1.2, -2 * 1.2),  # inside the range
        (0.95, -2.0, 2 * 0.95, 2 * 0.95),
        (7.0, 0.0, 0.0, 0.0),
    ],
)
def test_clip_table(ratio, advantage, loss, gradient) -> None:
    actual = one_token(math.log(ratio), advantage, dtype=torch.float64, clip_low=0.1, clip_high=0.3)
    assert actual == pytest.approx((loss, gradient))


def test_gradient_flows_to_the_policy_only() -> None:
    batch = LossInputs.random(0, [2, 3])
    leaves: list[Tensor] = [
        x.clone().requires_grad_()
        for x in (batch.logp, batch.logp_old, batch.advantage, batch.logp_ref, batch.kl_coef)
    ]
    logp, logp_old, advantage, logp_ref, kl_coef = leaves
    knobs = {"sequence_tokens": batch.sequence_tokens, "total_sequences": 2}
    knobs |= {"logp_ref": logp_ref, "kl_coef": kl_coef}
    for kl in ("unbiased_k3", "k3"):
        grpo_loss(logp, logp_old, advantage, batch.sequence, kl=kl, **knobs).loss.backward()
    assert all(leaf.grad is None for leaf in leaves[1:])


def far_and_near() -> LossInputs:
    """Two bad answers. The policy has moved 3 nats away from sequence 0, but not from 1."""
    batch = LossInputs.random(1, [3, 2], drift=0.05)
    far = (batch.sequence == 0).double()
    return replace(
        batch,
        logp_old=batch.logp_old + 3 * far,
        advantage=-torch.ones_like(batch.logp),
        kl_coef=torch.full_like(batch.logp, 0.5),
    )


def test_mask_affects_neither_kl_nor_denominators() -> None:
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


def test_mask_carries_no_gradient() -> None:
    batch = far_and_near()
    just_masked, just_kept = 2.0, 10.0
    assert batch.loss(mask_delta=just_kept)[0].loss == batch.loss(mask_delta=None)[0].loss
    _, gradient = batch.loss(mask_delta=just_masked, kl_coef=0.0)
    assert gradient[batch.sequence == 0].tolist() == [0.0] * 3
    good = replace(batch, advantage=-batch.advantage)
    assert good.loss(mask_delta=just_masked)[0].metrics["mask/sequence_fraction"].value == 0


@given(st.integers(0, 2**31), LENGTHS, st.integers(1, 4), st.booleans())
def test_shares_of_any_split_add_up(seed, lengths, parts, inside) -> None:
    batch = LossInputs.random(seed, lengths, drift=1.0)
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
        if not (inside and name == "mask/sequence_fraction"):  # counted in each part
            assert merged[name].value == pytest.approx(expected[name].value, nan_ok=True)


def test_no_tokens_give_a_differentiable_zero() -> None:
    hidden = torch.ones(3, requires_grad=True)
    nothing, none = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    knobs: dict[str, Any] = {"logp_ref": nothing, "kl_coef": nothing, "mask_delta": 2.0}
    knobs |= {"sequence_tokens": none, "total_sequences": 4}
    output = grpo_loss(hidden[:0], nothing, nothing, none, **knobs)
    output.loss.backward()
    assert output.loss.item() == 0
    assert hidden.grad.tolist() == [0.0] * 3
    full = LossInputs.random(0, [2, 3]).loss(mask_delta=2.0)[0].metrics
    assert merge([output.metrics, full]) == full


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("kl", ["unbiased_k3", "k3"])
def test_reference_is_ignored_where_beta_is_zero(poison: float, kl: str) -> None:
    batch = LossInputs.random(4, [3, 2, 4])
    free = batch.kl_coef == 0
    assert 0 < free.sum() < len(free)
    clean, gradient = batch.loss(kl=kl)
    poisoned = replace(batch, logp_ref=torch.where(free, poison, batch.logp_ref))
    output, actual = poisoned.loss(kl=kl)
    assert output.loss == clean.loss
    assert torch.equal(actual, gradient)
    assert poisoned.loss(kl=kl, kl_coef=0.0)[0].loss.isfinite()
    everywhere = replace(batch, logp_ref=torch.full_like(batch.logp, poison))
    assert not everywhere.loss()[0].loss.isfinite()
    if math.isnan(poison):
        mean = output.metrics["kl/ref"]
        assert mean.count == (~free).sum() and math.isfinite(mean.total)


def test_masked_infinite_log_ratio_is_harmless() -> None:
    batch = replace(far_and_near(), kl_coef=torch.zeros(5, dtype=torch.float64))
    row = int((batch.sequence == 0).nonzero()[0])
    logp = batch.logp.clone()
    logp[row] = -INF
    clean, gradient = batch.loss(mask_delta=2.0)
    output, actual = replace(batch, logp=logp).loss(mask_delta=2.0)
    assert output.loss == clean.loss
    assert torch.equal(actual, gradient)
    beta = torch.ones_like(logp)
    assert replace(batch, logp=logp, kl_coef=beta).loss(mask_delta=2.0)[0].loss.isnan()


def poisoned_token(field: str, value: float, advantage: float) -> LossInputs:
    """One on-policy sequence of three tokens, of which the second has `value`."""
    batch = LossInputs.random(0, [3], drift=0.0)
    changed = getattr(batch, field).clone()
    changed[1] = value
    return replace(batch, advantage=torch.full((3,), advantage).double(), **{field: changed})


@pytest.mark.parametrize(
    ("field", "advantage", "edge"), [("logp_old", 1.0, 1.2), ("logp", -1.0, 0.8)]
)
def test_clipped_infinite_log_ratio_is_harmless(field, advantage, edge) -> None:
    output, gradient = poisoned_token(field, -INF, advantage).loss(kl_coef=0.0)
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
def test_non_finite_tokens_reach_the_loss(field, value, advantage, mask_delta) -> None:
    batch = poisoned_token(field, value, advantage)
    output, _ = batch.loss(kl_coef=0.0, mask_delta=mask_delta)
    assert output.loss.isnan()
    assert math.isnan(output.metrics["loss"].value)


@pytest.mark.parametrize("log_ratio", [21.0, 50.0, 1000.0, 1e30])
def test_extreme_ratios_keep_a_finite_gradient(log_ratio: float) -> None:
    largest = math.exp(20)
    # A bad token with a large ratio must keep its gradient.
    assert one_token(log_ratio, -1.0) == pytest.approx((largest, largest), rel=1e-6)
    assert one_token(log_ratio, 1.0) == pytest.approx((-1.2, 0.0))
    assert one_token(-log_ratio, -1.0) == pytest.approx((0.8, 0.0))
    assert one_token(-log_ratio, 1.0) == pytest.approx((-1 / largest, -1 / largest), rel=1e-6)


def test_metrics_by_hand() -> None:
    logp = torch.tensor([-1.0, -2.0, -4.0], dtype=torch.float64, requires_grad=True)
    logp_old, advantage, logp_ref = torch.tensor(
        [[-2.0, -2.0, -1.0], [1.0, 1.0, -1.0], [-1.0, -3.0, -4.0]], dtype=torch.float64
    )
    knobs: dict[str, Any] = {"logp_ref": logp_ref, "kl_coef": 0.5, "mask_delta": 2.0}
    knobs |= {"sequence_tokens": torch.tensor([2, 1]), "total_sequences": 2}
    output = grpo_loss(logp, logp_old, advantage, torch.tensor([0, 0, 1]), **knobs)
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
        "mask/logp_gap_max": Max(3.0),  # sequence 1; sequence 0 moved the other way
        "clip/fraction": Mean(1, 3),
    }
    actual = output.metrics
    assert actual.keys() == expected.keys()
    for name, metric in expected.items():
        assert type(actual[name]) is type(metric)
        assert actual[name].value == pytest.approx(metric.value)
    assert not output.totals.requires_grad


def validate(**change: Any) -> None:
    """Call the loss with two sequences of one and two tokens."""
    zeros = torch.zeros(3)
    arguments: dict[str, Any] = {
        "logp": zeros,
        "logp_old": zeros,
        "advantage": zeros,
        "sequence": torch.tensor([0, 1, 1]),
        "sequence_tokens": torch.tensor([1, 2]),
        "total_sequences": 2,
        "logp_ref": zeros,
        "kl_coef": 0.1,
        **change,
    }
    positional = [arguments.pop(name) for name in ("logp", "logp_old", "advantage", "sequence")]
    grpo_loss(*positional, **arguments)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"logp": torch.zeros(3, 1)}, r"^logp\b"),
        ({"logp": torch.zeros(3).bfloat16()}, r"^logp\b"),
        ({"logp_old": torch.zeros(2)}, r"^logp_old\b"),
        ({"advantage": torch.tensor([0.0, NAN, NAN])}, r"^advantage\[1\]"),
        ({"sequence": torch.tensor([0.0, 1.0, 1.0])}, r"^sequence\b"),
        ({"sequence": torch.tensor([0, 1, 2])}, r"^sequence\[2\]"),
        ({"sequence": torch.tensor([0, -1, 1])}, r"^sequence\[1\]"),
        ({"sequence_tokens": torch.tensor([1.0, 2.0])}, r"^sequence_tokens\b"),
        ({"sequence_tokens": torch.tensor([0, 2])}, r"^sequence_tokens\[0\]"),
        ({"sequence_tokens": torch.tensor([1, 1])}, r"^sequence_tokens\[1\]"),
        ({"total_sequences": 1}, r"^total_sequences\b"),
        ({"sequence_weight": torch.ones(3)}, r"^sequence_weight\b"),
        ({"sequence_weight": torch.tensor([1.0, -1.0])}, r"^sequence_weight\b"),
        ({"logp_ref": torch.zeros(4)}, r"^logp_ref\b"),
        ({"logp_ref": None}, r"^logp_ref\b"),
        ({"kl_coef": -0.1}, r"^kl_coef\b"),
        ({"kl_coef": torch.zeros(2)}, r"^kl_coef\b"),
        ({"kl_coef": torch.tensor([0.0, 0.1, -0.1])}, r"^kl_coef\[2\]"),
        ({"clip_low": -0.1}, r"^clip_low\b"),
        ({"clip_low": 1.5}, r"^clip_low\b"),
        ({"clip_high": -0.1}, r"^clip_high\b"),
        ({"mask_delta": NAN}, r"^delta\b"),
        ({"kl": "k2"}, r"^kl\b"),
    ],
)
def test_invalid_arguments_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        validate(**change)


def test_boundary_arguments_are_accepted() -> None:
    validate()
    validate(logp_ref=None, kl_coef=0.0)
    validate(logp_ref=None, kl_coef=torch.zeros(3))
    validate(logp_old=torch.zeros(3, dtype=torch.float64))
    validate(sequence_tokens=torch.tensor([5, 9], dtype=torch.int32))
    validate(total_sequences=100, mask_delta=0.0, clip_low=1.0, clip_high=INF)
    validate(advantage=torch.tensor([0.5, 1.0, -0.75]))


MASKS_SOME = {"seed": 3, "lengths": [3, 1, 4, 2], "drift": 1.0, "kl": "unbiased_k3", "delta": 0.2}


@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    drift=st.floats(0, 2),
    clip_low=st.floats(0, 0.9),
    clip_high=st.floats(0, 2),
    delta=st.none() | st.floats(0, 1),
    kl=st.sampled_from(["unbiased_k3", "k3"]),
)
@example(**MASKS_SOME, clip_low=0.2, clip_high=0.2)
def test_loss_matches_the_oracle(seed, lengths, drift, clip_low, clip_high, delta, kl) -> None:
    batch = LossInputs.random(seed, lengths, drift=drift)
    answers, leaf = batch.answers()
    knobs = {"clip_low": clip_low, "clip_high": clip_high, "mask_delta": delta, "kl": kl}
    expected = reference_grpo(answers, **knobs)
    expected.loss.backward()
    output, gradient = batch.loss(**knobs)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(gradient, leaf.grad)
    actual = {name: metric.value for name, metric in output.metrics.items()}
    assert actual == pytest.approx(expected.metrics, abs=1e-12)


def mask(gap: list[float], advantage: list[float], sequence: list[int], delta: float) -> list[bool]:
    """The mask for log π_old − log π_θ = `gap`, with π_old at −1 nat."""
    logp_old = torch.full((len(gap),), -1.0)
    rows = logp_old - torch.tensor(gap), logp_old, torch.tensor(advantage), torch.tensor(sequence)
    knobs = {"num_sequences": max(sequence) + 1, "delta": delta}
    return off_policy_sequence_mask(*rows, **knobs).tolist()


@given(st.integers(0, 2**31), LENGTHS, st.floats(0, 1.5))
def test_mask_matches_the_oracle(seed: int, lengths: list[int], delta: float) -> None:
    batch = LossInputs.random(seed, lengths, drift=1.0)
    rows = batch.logp, batch.logp_old, batch.advantage, batch.sequence
    keep = off_policy_sequence_mask(*rows, num_sequences=len(lengths), delta=delta)
    answers, _ = batch.answers()
    expected = torch.tensor([sequence_mask(answer, delta) == 1 for answer in answers])
    assert torch.equal(keep, expected[batch.sequence])


def test_a_gap_equal_to_delta_is_kept() -> None:
    assert mask([2.0, 2.0], [-1.0, -1.0], [0, 0], 2.0) == [True, True]
    assert mask([2.0, 2.0], [-1.0, -1.0], [0, 0], 1.9999) == [False, False]


def test_long_sums_do_not_drift() -> None:
    gap = float(torch.tensor(0.3))
    below = float(torch.nextafter(torch.tensor(0.3), torch.tensor(0.0)))
    tokens = 20_000
    for delta, kept in ((gap, True), (below, False)):
        keep = off_policy_sequence_mask(
            torch.full((tokens,), -gap),
            torch.zeros(tokens),
            -torch.ones(tokens),
            torch.zeros(tokens, dtype=torch.int64),
            num_sequences=1,
            delta=delta,
        )
        assert bool(keep.all()) == bool(keep.any()) == kept


def test_advantages_may_vary_within_a_sequence() -> None:
    # Â_{i,t}: the gap is the sequence's, the sign each token's own.
    assert mask([3.0, 1.0, 2.0], [-1.0, 1.0, 0.0], [0, 0, 0], 1.5) == [False, True, True]
    assert mask([3.0, 1.0, 2.0], [-1.0, 1.0, 0.0], [0, 0, 0], 2.0) == [True, True, True]


def test_infinite_gaps_drop_and_nan_does_not() -> None:
    assert mask([INF, 0.0], [-1.0, -1.0], [0, 0], 2.0) == [False, False]
    assert mask([INF, 0.0], [1.0, 1.0], [0, 0], 2.0) == [True, True]
    assert mask([float("nan"), 9.0], [-1.0, -1.0], [0, 0], 2.0) == [True, True]


def test_empty_sequences() -> None:
    assert mask([3.0], [-1.0], [4], 2.0) == [False]
    nothing, none = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    rows = nothing, nothing, nothing, none
    assert off_policy_sequence_mask(*rows, num_sequences=0, delta=2.0).shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logp": torch.zeros(2, 1)}, r"logp"),
        ({"logp_old": torch.zeros(3)}, r"logp_old"),
        ({"sequence": torch.zeros(2, dtype=torch.int32)}, r"sequence"),
        ({"sequence": torch.tensor([0, 2])}, r"sequence\[1\]"),
        ({"sequence": torch.tensor([-1, 0])}, r"sequence\[0\]"),
        ({"advantage": torch.tensor([0.0, INF])}, r"advantage\[1\]"),
        ({"num_sequences": -1}, r"num_sequences"),
        ({"delta": float("nan")}, r"delta"),
    ],
)
def test_invalid_arguments_of_the_mask(change: dict[str, Any], message: str) -> None:
    rows = {name: torch.zeros(2) for name in ("logp", "logp_old", "advantage")}
    good = {**rows, "sequence": torch.tensor([0, 1]), "num_sequences": 2, "delta": 1.0, **change}
    positional = [good.pop(name) for name in (*rows, "sequence")]
    with pytest.raises(ValueError, match=message):
        off_policy_sequence_mask(*positional, **good)


def test_shortfall_in_nats() -> None:
    mass = torch.tensor([0.99, 0.81, 0.405, 0.081], dtype=torch.float64)
    log_mass = mass.log().requires_grad_()
    short = kept_mass_shortfall(log_mass, top_p=0.9)
    expected = torch.tensor([0, 0, math.log(2), math.log(10)], dtype=torch.float64)
    torch.testing.assert_close(short, expected)
    short.sum().backward()
    assert log_mass.grad[[0, 2, 3]].tolist() == [0, -1, -1]


@pytest.mark.parametrize("rounding", [0.0, 0.1])
def test_fresh_samples_have_no_shortfall(rounding: float) -> None:
    logits = torch.randn(2000, 30, dtype=torch.float64) * 2
    ordered, ids = logits.softmax(-1).sort(-1, descending=True)
    first = ordered.cumsum(-1) - ordered < 0.8
    kept = torch.zeros_like(first).scatter(-1, ids, first)
    noisy = (logits + rounding * torch.randn_like(logits)).softmax(-1)
    mass = (noisy * kept).sum(-1)
    assert (mass < 0.8).any() == (rounding > 0)
    assert not kept_mass_shortfall(mass.log(), top_p=0.8).any()


def test_invalid_masses_are_named() -> None:
    for log_mass in (torch.zeros(2, 2), torch.zeros(2, dtype=torch.long)):
        with pytest.raises(ValueError, match="log_mass"):
            kept_mass_shortfall(log_mass, top_p=0.9)
    kept_mass_shortfall(torch.zeros(2), top_p=1.0)
    for top_p in (0.0, 1.5):
        with pytest.raises(ValueError, match="top_p"):
            kept_mass_shortfall(torch.zeros(2), top_p=top_p)
