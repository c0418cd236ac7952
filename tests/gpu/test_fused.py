"""The fast layers against transformers' own, and gradients into their float32 sums.

The kernels run on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1).
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.marks import DEVICE, KERNELS

pytest.importorskip("triton", reason="Triton is not installed")

from transformers.integrations.moe import grouped_mm_experts_forward

from keel.model.layers.fused import fused_experts

pytestmark = KERNELS
EXPERTS, PER_TOKEN, TOKENS = 6, 3, 16


@pytest.mark.parametrize(("hidden", "width"), [(32, 16), (1040, 1056)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_those_of_transformers(hidden: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(shape, device=DEVICE) * scale
        for shape, scale in (
            ((TOKENS, hidden), 1.0),
            ((TOKENS, PER_TOKEN), 1.0),
            ((EXPERTS, 2 * width, hidden), hidden**-0.5),
            ((EXPERTS, hidden, width), width**-0.5),
        )
    ]
    # The last expert gets no token.
    chosen = torch.rand(TOKENS, EXPERTS - 1, device=DEVICE).topk(PER_TOKEN).indices
    gradient = torch.randn(TOKENS, hidden, device=DEVICE)

    def run(function: Any, kind: torch.dtype) -> list[Any]:
        leaves = [x.detach().to(kind).requires_grad_() for x in inputs]
        output = function(*leaves)
        output.backward(gradient.to(kind))
        return [output, *(leaf.grad for leaf in leaves)]

    def plain(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        experts: Any = SimpleNamespace(
            num_experts=EXPERTS,
            gate_up_proj=gate_up,
            down_proj=down,
            has_gate=True,
            has_bias=False,
            is_transposed=False,
            _is_expert_parallel=False,
            _apply_gate=lambda z: torch.nn.functional.silu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1],
        )
        return grouped_mm_experts_forward(experts, x, chosen, weights)

    def fused(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return fused_experts(x, chosen, weights, gate_up, down)

    exact = run(plain, torch.float32)
    for actual, expected in zip(run(fused, dtype), exact, strict=True):
        error = (actual.float() - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)
    assert not run(fused, dtype)[3][-1].any(), "an expert without tokens has no gradient"


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
