"""The fused kernels for packed segments equal plain attention over padded blocks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.model.attention import Segments, _packed_attention
from keel.model.layers import flash4
from keel.model.torch_internals import replace_flash_kernels
from tests.gpu.marks import GPU, skip_without_flash4

pytestmark = GPU

LENGTHS = [1, 130, 64, 7, 300, 65]
FOLLOWS = [-1, -1, 1, 1, -1, 4]
"""Beginnings of 130 and 300 tokens, which two and one of the others follow."""


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "flash4":
        skip_without_flash4()
        handle = replace_flash_kernels(flash4.__name__)
        yield
        handle.remove()
    else:
        yield


def inputs(heads: int, kv_heads: int, width: int) -> list[Tensor]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    counts = (heads, kv_heads, kv_heads)
    return [torch.randn(1, count, sum(LENGTHS), width, **options) for count in counts]


def trained(
    given: list[Tensor],
    dtype: torch.dtype,
    window: int | None,
    follows: list[int] | None = None,
) -> list[Tensor]:
    """Output and gradients, in float32."""
    segments = Segments.of(LENGTHS, "cuda", follows=follows)
    leaves = [x.detach().to(dtype).requires_grad_() for x in given]
    output, _ = _packed_attention(
        torch.nn.Identity(), *leaves, None, segments=segments, scaling=0.125, sliding_window=window
    )
    torch.manual_seed(1)
    (output.float() * torch.randn(output.shape, device="cuda")).sum().backward()
    grads = [leaf.grad for leaf in leaves]
    return [x.float() for x in (output, *grads) if x is not None]


@pytest.mark.parametrize("follows", [None, FOLLOWS], ids=["apart", "shared prompts"])
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("kernels", ["torch", "flash4"], indirect=True)
@pytest.mark.usefixtures("kernels")
def test_packed_equals_padded(kv_heads: int, window: int | None, follows: list[int] | None) -> None:
    given = inputs(8, kv_heads, 64)
    fused = trained(given, torch.bfloat16, window, follows)
    plain = trained(given, torch.float32, window, follows)
    for one, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))
