"""Gradients into their float32 sums by the kernel that does it on GPUs.

It runs on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1).
"""

import pytest
import torch

from tests.gpu.marks import DEVICE, KERNELS

pytestmark = KERNELS


@pytest.mark.parametrize("count", [1, 4096, 10_007])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_those_of_float32(count: int, dtype: torch.dtype) -> None:
    from keel.trainer.engine.grad_kernels import add  # noqa: PLC0415

    around = 5  # neighbours must not change, as in DeepSpeed's flat buffers
    flat = torch.randn(count + 2 * around, device=DEVICE)
    before, sums = flat.clone(), flat[around : around + count]
    gradients = torch.randn(count, device=DEVICE).to(dtype)
    for times in (1, 2):
        add(sums, gradients)
        expected = before.clone()
        for _ in range(times):
            expected[around : around + count] += gradients.float()
        assert torch.equal(flat, expected)
