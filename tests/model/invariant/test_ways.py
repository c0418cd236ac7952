"""Which way a GEMM or a norm goes: only one with the same bits, the fastest of those. What the
kernels give is tested in tests/gpu/test_invariant_kernels.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from keel.model import invariant
from keel.model.invariant import ways

WIDE = torch.ones(3, 4, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of the kind that has been compared, with kernels that compute what PyTorch does here."""
    found = SimpleNamespace(
        capability=(9, 0),
        capturing=False,
        kernels=SimpleNamespace(
            few_rows=lambda *given: linear(*given), norm_heads=lambda x, weight, eps: x * weight
        ),
        seconds=(2.0, 1.0),
    )
    monkeypatch.setattr(ways, "_WAYS", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found.capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(invariant, "kernels", found.kernels, raising=False)
    monkeypatch.setitem(sys.modules, "keel.model.invariant.kernels", found.kernels)
    monkeypatch.setattr(ways, "_whole", lambda *given: linear(*given))
    monkeypatch.setattr(ways, "_untold", lambda *given: linear(*given))
    clock = iter(found.seconds)
    monkeypatch.setattr(ways, "_seconds", lambda _: next(clock))
    return found


def own(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(x, weight, bias)


def other(*given: Any) -> Tensor:
    return linear(*given) + 1


def taken(rows: int = 2, dtype: torch.dtype = torch.bfloat16) -> Callable[..., Any]:
    ways.linear(own, torch.ones(rows, 4, dtype=dtype), WIDE.to(dtype))
    (way,) = ways._WAYS.values()
    return way


def test_the_faster_of_those_with_the_same_bits(gpu: SimpleNamespace) -> None:
    assert taken() is gpu.kernels.few_rows


@pytest.mark.parametrize("differs", ["few_rows", "whole", "both"])
def test_none_whose_bits_differ(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, differs: str
) -> None:
    if differs != "whole":
        gpu.kernels.few_rows = other
    if differs != "few_rows":
        monkeypatch.setattr(ways, "_whole", other)
    left = {"few_rows": ways._whole, "whole": gpu.kernels.few_rows, "both": own}
    assert taken() is left[differs]


def test_many_rows_are_not_for_narrow_tiles() -> None:
    assert taken(rows=ways.FEW + 1) is ways._whole


def test_cublas_is_left_alone_where_its_tiles_fill_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "FULL", 6)
    assert taken(rows=2) is ways._untold


def test_by_the_fewest_rows_that_go_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of three rows decides for two, too."""
    monkeypatch.setattr(ways, "FULL", 9)
    assert taken(rows=3) is not ways._untold


@pytest.mark.parametrize(
    ("capability", "dtype"), [((10, 0), torch.bfloat16), ((9, 0), torch.float32)]
)
def test_what_has_not_been_compared_is_vllms(
    gpu: SimpleNamespace, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    gpu.capability = capability
    assert taken(dtype=dtype) is own


def test_while_a_graph_is_captured_nothing_is_compared_or_remembered(gpu: SimpleNamespace) -> None:
    gpu.capturing = True
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    assert torch.equal(ways.linear(own, x, WIDE), own(x, WIDE))
    ways.norm_heads(lambda x, weight, eps: x, x[None], x[0], 1e-6)
    assert not ways._WAYS


def test_trials_are_of_random_numbers(gpu: SimpleNamespace) -> None:
    """An engine's first steps are of sequences that are all alike: a sum of equal numbers is the
    same in any order."""
    gpu.kernels.few_rows = lambda x, *rest: linear(x, *rest) + float(x.std() > 0.5)
    assert taken() is ways._whole


@pytest.mark.parametrize("same", [False, True])
def test_norms_likewise(gpu: SimpleNamespace, same: bool) -> None:
    def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * weight + float(not same)

    ways.norm_heads(plain, torch.ones(2, 3, 4), torch.ones(4), 1e-6)
    assert list(ways._WAYS.values()) == [gpu.kernels.norm_heads if same else plain]


def test_cublas_is_told_for_the_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is PyTorch's to name, and a build for CPUs has none."""
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda *_: None)
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    with ways._cublaslt(torch.bfloat16, splits=False):
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_bf16_reduced_precision_reduction_split_k
    assert matmul.allow_bf16_reduced_precision_reduction == before
    assert matmul.allow_bf16_reduced_precision_reduction_split_k
