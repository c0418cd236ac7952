"""The fused kernels for packed segments equal plain attention over padded blocks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.model.attention import Segments, _packed_attention, _packed_attention4
from keel.model.layers.flash4 import missing
from keel.model.tiny.build import default_cache_dir
from tests.gpu.marks import GPU

pytestmark = GPU

LENGTHS = [1, 130, 64, 7, 300, 65]
FOLLOWS = [-1, -1, 1, 1, -1, 4]
"""Beginnings of 130 and 300 tokens, which two and one of the others follow."""


def kernels(name: str) -> Callable[..., Any]:
    if name == "torch":
        return _packed_attention
    if why := missing(torch.device("cuda"), default_cache_dir()):
        pytest.skip(why)
    return _packed_attention4


def inputs(heads: int, kv_heads: int, width: int, of_values: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((heads, width), (kv_heads, width), (kv_heads, of_values))
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    return [torch.randn(1, many, sum(LENGTHS), wide, **options) for many, wide in shapes]


def trained(
    attend: Callable[..., Any],
    given: list[Tensor],
    dtype: torch.dtype,
    window: int | None,
    follows: list[int] | None = None,
) -> list[Tensor]:
    """Output and gradients, in float32."""
    segments = Segments.of(LENGTHS, "cuda", follows=follows)
    leaves = [x.detach().to(dtype).requires_grad_() for x in given]
    output, _ = attend(
        torch.nn.Identity(), *leaves, None, segments=segments, scaling=0.125, sliding_window=window
    )
    torch.manual_seed(1)
    (output.float() * torch.randn(output.shape, device="cuda")).sum().backward()
    grads = [leaf.grad for leaf in leaves]
    return [x.float() for x in (output, *grads) if x is not None]


@pytest.mark.parametrize("follows", [None, FOLLOWS], ids=["apart", "shared prompts"])
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("name", ["torch", "flash4"])
def test_packed_equals_padded(
    name: str, kv_heads: int, window: int | None, follows: list[int] | None
) -> None:
    attend, given = kernels(name), inputs(8, kv_heads, 64, 64)
    fused = trained(attend, given, torch.bfloat16, window, follows)
    plain = trained(_packed_attention, given, torch.float32, window, follows)
    for one, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))
