"""`grpo_loss` against the naive oracle: loss, gradient and every metric."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keel.rl.losses import KL
from tests.rl.batches import LossInputs
from tests.rl.reference_grpo import reference_grpo

MASKS_SOME = {"seed": 3, "lengths": [3, 1, 4, 2], "drift": 1.0, "kl": "unbiased_k3", "delta": 0.2}


@settings(deadline=None, max_examples=30)
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
def test_loss_matches_the_oracle(
    seed: int,
    lengths: list[int],
    drift: float,
    clip_low: float,
    clip_high: float,
    delta: float | None,
    kl: KL,
) -> None:
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
