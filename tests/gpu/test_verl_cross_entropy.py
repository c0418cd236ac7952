"""The loss that stands for flash-attn's in verl's arm, against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.marks import DEVICE, INTERPRETED, KERNELS
from tests.rollout import interpreted

# The kernels load Triton, which stays out of a run that skips them.
# ruff: noqa: PLC0415
pytestmark = KERNELS


@pytest.fixture(scope="module", autouse=True)
def triton() -> None:
    if INTERPRETED:
        interpreted.lend_triton()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("columns", [100, 9001])
def test_losses_and_gradients_are_those_of_torch(columns: int, inplace: bool) -> None:
    from benchmarks.peers.verl_cross_entropy import cross_entropy_loss

    torch.manual_seed(0)
    logits = 5 * torch.randn(7, columns, device=DEVICE)
    labels = torch.randint(columns, (7,), device=DEVICE)
    upstream = torch.randn(7, device=DEVICE)
    theirs = logits.clone().requires_grad_()
    wanted = F.cross_entropy(theirs, labels, reduction="none")
    wanted.backward(upstream)
    leaf = logits.clone().requires_grad_()
    losses, _ = cross_entropy_loss(leaf * 1.0, labels, inplace_backward=inplace)
    losses.backward(upstream)
    torch.testing.assert_close(losses, wanted)
    torch.testing.assert_close(leaf.grad, theirs.grad)
