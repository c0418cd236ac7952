"""The fused kernel for packed segments equals plain attention over padded blocks."""

from __future__ import annotations

import pytest
import torch

from keel.model.attention import Segments, packed_attention
from tests.gpu.marks import GPU

pytestmark = GPU


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_varlen_equals_padded(window: int | None, kv_heads: int) -> None:
    torch.manual_seed(0)
    lengths = [1, 130, 64, 7, 300, 65]
    segments = Segments.of(lengths, "cuda")
    heads = {"query": 8, "key": kv_heads, "value": kv_heads}
    inputs = {
        name: torch.randn(1, count, sum(lengths), 64, device="cuda", dtype=torch.bfloat16)
        for name, count in heads.items()
    }
    weights = torch.randn(1, sum(lengths), 8, 64, device="cuda")

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs.values()]
        output, _ = packed_attention(
            torch.nn.Identity(),
            *leaves,
            None,
            segments=segments,
            scaling=0.125,
            sliding_window=window,
        )
        (output.float() * weights).sum().backward()
        return [output.float(), *(leaf.grad.float() for leaf in leaves)]

    for fused, plain in zip(run(torch.bfloat16), run(torch.float32), strict=True):
        torch.testing.assert_close(fused, plain, rtol=2e-2, atol=2e-2 * float(plain.abs().max()))
