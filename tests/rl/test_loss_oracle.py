"""`grpo_loss` against the naive oracle: loss, gradient and every metric."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keel.rl.losses import KL
from keel.rl.metrics import Metric, merge, values
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


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    delta=st.none() | st.floats(0, 1),
    kl=st.sampled_from(["unbiased_k3", "k3"]),
    cuts=st.integers(1, 3),
)
def test_group_weights_match_the_oracle(
    seed: int, sizes: list[int], delta: float | None, kl: KL, cuts: int
) -> None:
    """The oracle averages within groups, then over groups; it has no weights."""
    random = Random(seed)
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    batch = LossInputs.random(seed, [random.randint(1, 4) for _ in groups])
    answers, leaf = batch.answers()
    expected = reference_grpo(answers, groups=groups, mask_delta=delta, kl=kl)
    expected.loss.backward()
    total = len(groups)
    weight = torch.tensor([total / (len(sizes) * sizes[group]) for group in groups])
    torch.testing.assert_close(weight.mean().item(), 1.0)
    part = torch.tensor([random.randrange(cuts) for _ in groups])[batch.sequence]
    loss, gradient, metrics = 0.0, torch.zeros_like(batch.logp), list[Mapping[str, Metric]]()
    for index in range(cuts):
        rows = (part == index).nonzero()[:, 0]
        owners = torch.unique(batch.sequence[rows])
        output, part_gradient = batch.rows(rows).loss(
            mask_delta=delta, kl=kl, total_sequences=total, sequence_weight=weight[owners]
        )
        loss += output.loss.item()
        gradient[rows] += part_gradient
        metrics.append(output.metrics)
    torch.testing.assert_close(loss, expected.loss.item())
    torch.testing.assert_close(gradient, leaf.grad)
    assert values(merge(metrics)) == pytest.approx(expected.metrics, abs=1e-6)
