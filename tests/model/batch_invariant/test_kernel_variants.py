"""Choice of kernel variants: only bit-identical ones, and the fastest of them.

tests/gpu/test_invariant_kernels.py tests the kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from keel.model import batch_invariant as invariant
from keel.model.batch_invariant import kernel_variants

WIDE = torch.ones(3, 4, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake Hopper GPU whose kernels are PyTorch functions."""
    fake = SimpleNamespace(
        capability=(9, 0),
        capturing=False,
        kernels=SimpleNamespace(
            few_rows=lambda *inputs: linear(*inputs), norm_heads=lambda x, weight, eps: x * weight
        ),
        seconds=(2.0, 1.0),
    )
    monkeypatch.setattr(kernel_variants, "_CHOICES", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: fake.capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(invariant, "kernels", fake.kernels, raising=False)
    monkeypatch.setitem(sys.modules, "keel.model.batch_invariant.kernels", fake.kernels)
    monkeypatch.setattr(kernel_variants, "_without_split_k", lambda *inputs: linear(*inputs))
    monkeypatch.setattr(kernel_variants, "_default", lambda *inputs: linear(*inputs))
    clock = iter(fake.seconds)
    monkeypatch.setattr(kernel_variants, "_seconds", lambda _: next(clock))
    return fake


def own(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(x, weight, bias)


def other(*inputs: Any) -> Tensor:
    return linear(*inputs) + 1


def taken(rows: int = 2, dtype: torch.dtype = torch.bfloat16) -> Callable[..., Any]:
    kernel_variants.linear(own, torch.ones(rows, 4, dtype=dtype), WIDE.to(dtype))
    (choice,) = kernel_variants._CHOICES.values()
    return choice


@pytest.mark.parametrize("differs", ["few_rows", "whole", "both"])
def test_variants_must_be_bit_identical(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, differs: str
) -> None:
    if differs != "whole":
        gpu.kernels.few_rows = other
    if differs != "few_rows":
        monkeypatch.setattr(kernel_variants, "_without_split_k", other)
    expected = {
        "few_rows": kernel_variants._without_split_k,
        "whole": gpu.kernels.few_rows,
        "both": own,
    }
    assert taken() is expected[differs]


def test_row_classes_have_one_tile_height() -> None:
    """Tiles are as high as the next power of two."""
    variants_of: dict[int, set[int]] = {}
    for rows in range(1, 1025):
        variants_of.setdefault(kernel_variants._doublings(rows), set()).add(
            1 << (rows - 1).bit_length()
        )
    assert all(len(heights) == 1 for heights in variants_of.values())
    assert kernel_variants._doublings(kernel_variants.FEW) < kernel_variants._doublings(
        kernel_variants.FEW + 1
    )


@pytest.mark.parametrize("same", [False, True])
def test_norms_must_be_bit_identical(gpu: SimpleNamespace, same: bool) -> None:
    def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * weight + float(not same)

    kernel_variants.norm_heads(plain, torch.ones(2, 3, 4), torch.ones(4), 1e-6)
    assert list(kernel_variants._CHOICES.values()) == [gpu.kernels.norm_heads if same else plain]
