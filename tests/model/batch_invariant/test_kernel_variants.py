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


def test_the_fastest_variant_is_chosen(gpu: SimpleNamespace) -> None:
    assert taken() is gpu.kernels.few_rows


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


def test_many_rows_skip_narrow_tiles() -> None:
    assert taken(rows=kernel_variants.FEW + 1) is kernel_variants._without_split_k


def test_trials_use_limited_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_variants, "MOST", 4)
    counts: list[int] = []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        counts.append(len(x))
        return linear(x, weight, bias)

    out = kernel_variants.linear(counted, torch.ones(6, 4, dtype=torch.bfloat16), WIDE)
    assert counts == [4] and len(out) == 6


def test_full_tiles_use_plain_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_variants, "FULL", 6)
    assert taken(rows=2) is kernel_variants._default


def test_fullness_counts_the_fewest_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of four rows decides for three, too."""
    monkeypatch.setattr(kernel_variants, "FULL", 12)
    assert taken(rows=4) is not kernel_variants._default


@pytest.mark.parametrize("full", [9, 13])
def test_variants_must_match_for_the_fewest_rows(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    def splits(x: Tensor, *rest: Any) -> Tensor:
        return linear(x, *rest) + float(len(x) == 3)

    monkeypatch.setattr(kernel_variants, "FULL", full)
    for name in ("_default", "_without_split_k"):
        monkeypatch.setattr(kernel_variants, name, splits)
    gpu.kernels.few_rows = other
    assert taken(rows=4) is own


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


def test_empty_inputs_are_not_remembered() -> None:
    x = torch.ones(0, 4, dtype=torch.bfloat16)
    assert kernel_variants.linear(own, x, WIDE).shape == (0, 3)
    assert kernel_variants.norm_heads(
        lambda x, weight, eps: x, x[:, None], WIDE[0], 1e-6
    ).shape == (0, 1, 4)
    assert not kernel_variants._CHOICES


@pytest.mark.parametrize(
    ("capability", "dtype"), [((10, 0), torch.bfloat16), ((9, 0), torch.float32)]
)
def test_other_gpus_and_dtypes_use_vllm(
    gpu: SimpleNamespace, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    gpu.capability = capability
    assert taken(dtype=dtype) is own


def test_graph_capture_compares_nothing(gpu: SimpleNamespace) -> None:
    gpu.capturing = True
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    assert torch.equal(kernel_variants.linear(own, x, WIDE), own(x, WIDE))
    kernel_variants.norm_heads(lambda x, weight, eps: x, x[None], x[0], 1e-6)
    assert not kernel_variants._CHOICES


@pytest.mark.parametrize("rows", [2, kernel_variants.FEW + 1])
@pytest.mark.parametrize("given", [0.0, 1.0])
def test_trials_use_random_inputs(monkeypatch: pytest.MonkeyPatch, given: float, rows: int) -> None:
    """Equal inputs, as in an engine's first steps, sum to the same in any order."""
    monkeypatch.setattr(
        kernel_variants,
        "_without_split_k",
        lambda x, *rest: linear(x, *rest) + float(x.std() > 0.5),
    )
    kernel_variants.linear(own, torch.full((rows, 4), given, dtype=torch.bfloat16), WIDE)
    assert kernel_variants._without_split_k not in kernel_variants._CHOICES.values()


def test_trials_use_random_biases(gpu: SimpleNamespace) -> None:
    gpu.kernels.few_rows = lambda x, weight, bias: linear(x, weight) + 2 * bias
    kernel_variants.linear(own, WIDE, WIDE, torch.zeros(3, dtype=torch.bfloat16))
    assert list(kernel_variants._CHOICES.values()) == [kernel_variants._without_split_k]


@pytest.mark.parametrize("same", [False, True])
def test_norms_must_be_bit_identical(gpu: SimpleNamespace, same: bool) -> None:
    def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * weight + float(not same)

    kernel_variants.norm_heads(plain, torch.ones(2, 3, 4), torch.ones(4), 1e-6)
    assert list(kernel_variants._CHOICES.values()) == [gpu.kernels.norm_heads if same else plain]


def test_cublas_is_told_for_the_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is PyTorch's to name, and a build for CPUs has none."""
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda *_: None)
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    with kernel_variants._cublaslt(torch.bfloat16, splits=False):
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_bf16_reduced_precision_reduction_split_k
    assert matmul.allow_bf16_reduced_precision_reduction == before
    assert matmul.allow_bf16_reduced_precision_reduction_split_k
