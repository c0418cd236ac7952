"""The sequence mask against Eq. 9: sign, strictness, whole trajectories, no gradient."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.rl.offpolicy import kept_mass_shortfall, off_policy_sequence_mask
from tests.rl.batches import LossInputs
from tests.rl.reference_grpo import sequence_mask

INF = float("inf")


def mask(gap: list[float], advantage: list[float], sequence: list[int], delta: float) -> list[bool]:
    """The mask for log π_old − log π_θ = `gap`, with π_old at −1 nat."""
    logp_old = torch.full((len(gap),), -1.0)
    return off_policy_sequence_mask(
        logp_old - torch.tensor(gap),
        logp_old,
        torch.tensor(advantage),
        torch.tensor(sequence),
        num_sequences=max(sequence) + 1,
        delta=delta,
    ).tolist()


@settings(deadline=None, max_examples=20)
@given(
    st.integers(0, 2**31), st.lists(st.integers(1, 5), min_size=1, max_size=6), st.floats(0, 1.5)
)
def test_mask_matches_the_oracle(seed: int, lengths: list[int], delta: float) -> None:
    batch = LossInputs.random(seed, lengths, drift=1.0)
    keep = off_policy_sequence_mask(
        batch.logp,
        batch.logp_old,
        batch.advantage,
        batch.sequence,
        num_sequences=len(lengths),
        delta=delta,
    )
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
    logp_old = torch.zeros(tokens)
    for delta, kept in ((gap, True), (below, False)):
        keep = off_policy_sequence_mask(
            logp_old - gap,
            logp_old,
            torch.full((tokens,), -1.0),
            torch.zeros(tokens, dtype=torch.int64),
            num_sequences=1,
            delta=delta,
        )
        assert bool(keep.all()) == kept
        assert bool(keep.any()) == kept


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
    nothing = torch.zeros(0)
    keep = off_policy_sequence_mask(
        nothing, nothing, nothing, torch.zeros(0, dtype=torch.int64), num_sequences=0, delta=2.0
    )
    assert keep.shape == (0,)


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
def test_invalid_arguments_are_named(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "logp": torch.zeros(2),
        "logp_old": torch.zeros(2),
        "advantage": torch.zeros(2),
        "sequence": torch.tensor([0, 1]),
        "num_sequences": 2,
        "delta": 1.0,
    }
    arguments: dict[str, Any] = {**good, **change}
    positional: list[Tensor] = [
        arguments.pop(name) for name in ("logp", "logp_old", "advantage", "sequence")
    ]
    with pytest.raises(ValueError, match=message):
        off_policy_sequence_mask(*positional, **arguments)


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
    """Also if trainer and engine differ by bfloat16 rounding."""
    logits = torch.randn(2000, 30, dtype=torch.float64) * 2
    ordered, ids = logits.softmax(-1).sort(-1, descending=True)
    first = ordered.cumsum(-1) - ordered < 0.8
    kept = torch.zeros_like(first).scatter(-1, ids, first)
    noisy = (logits + rounding * torch.randn_like(logits)).softmax(-1)
    mass = (noisy * kept).sum(-1)
    assert (mass < 0.8).any() == (rounding > 0)
    assert not kept_mass_shortfall(mass.log(), top_p=0.8).any()


@pytest.mark.parametrize(
    ("log_mass", "top_p", "message"),
    [
        (torch.zeros(2, 2), 0.9, "log_mass"),
        (torch.zeros(2, dtype=torch.long), 0.9, "log_mass"),
        (torch.zeros(2), 0.0, "top_p"),
        (torch.zeros(2), 1.5, "top_p"),
    ],
)
def test_invalid_masses_are_named(log_mass: Tensor, top_p: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kept_mass_shortfall(log_mass, top_p=top_p)
