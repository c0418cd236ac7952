"""The loss on a GPU: the numbers of the CPU, and no wait for the device before the metrics."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import pytest
import torch

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
