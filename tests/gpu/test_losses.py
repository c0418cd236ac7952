"""The loss on a GPU: the numbers of the CPU, and no wait for the device before the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import pytest
import torch

from keel.rl.metrics import merge
from keel.rl.offpolicy import GapTotals
from tests.gpu.marks import GPU
from tests.rl.batches import LossInputs

pytestmark = GPU


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any host-device synchronisation inside is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(batch: LossInputs) -> LossInputs:
    return LossInputs(**{field.name: getattr(batch, field.name).cuda() for field in fields(batch)})


@pytest.mark.parametrize("kl_coef", [None, 0.0, 0.1])
def test_gpu_agrees_without_synchronizing(kl_coef: float | None) -> None:
    batch = LossInputs.random(0, [3, 1, 400, 20], drift=1.0)
    coef = {} if kl_coef is None else {"kl_coef": kl_coef}
    expected, expected_gradient = batch.loss(mask_delta=0.2, **coef)
    moved = on_gpu(batch)
    with no_waiting():
        output, gradient = moved.loss(mask_delta=0.2, **coef)
    torch.testing.assert_close(gradient.cpu(), expected_gradient)
    for name, metric in expected.metrics.items():
        assert output.metrics[name].value == pytest.approx(metric.value, nan_ok=True)


def test_gapped_parts_sum_to_the_whole() -> None:
    batch = LossInputs.random(3, [3, 1, 40, 20], drift=1.0)
    expected, expected_gradient = batch.loss(mask_delta=0.2)
    assert 0 < expected.metrics["mask/sequence_fraction"].value < 1
    parts = [torch.arange(start, len(batch.logp), 2) for start in (0, 1)]
    split = [(rows, torch.unique(batch.sequence[rows]), batch.rows(rows)) for rows in parts]
    whole, moved = on_gpu(batch), [(owners.cuda(), on_gpu(part)) for _, owners, part in split]
    with no_waiting():
        gaps = GapTotals(4, "cuda").add(whole.logp, whole.logp_old, whole.sequence).means()
        found = [
            part.loss(mask_delta=0.2, total_sequences=4, sequence_gap=gaps[owners])
            for owners, part in moved
        ]
    for (rows, _, _), (_, gradient) in zip(split, found, strict=True):
        torch.testing.assert_close(gradient.cpu(), expected_gradient[rows])
    metrics = merge(output.metrics for output, _ in found)
    for name in ("loss", "mask/sequence_fraction", "clip/fraction", "mismatch/kl"):
        assert metrics[name].value == pytest.approx(expected.metrics[name].value)
