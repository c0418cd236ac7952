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

from keel.model import batch_invariant as invariant
from keel.model.batch_invariant import kernel_variants as ways

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
    monkeypatch.setitem(sys.modules, "keel.model.batch_invariant.kernels", found.kernels)
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


def test_a_trial_is_of_some_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "MOST", 4)
    tried: list[int] = []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        tried.append(len(x))
        return linear(x, weight, bias)

    out = ways.linear(counted, torch.ones(6, 4, dtype=torch.bfloat16), WIDE)
    assert tried == [4] and len(out) == 6


def test_cublas_is_left_alone_where_its_tiles_fill_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "FULL", 6)
    assert taken(rows=2) is ways._untold


def test_by_the_fewest_rows_that_go_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of four rows decides for three, too."""
    monkeypatch.setattr(ways, "FULL", 12)
    assert taken(rows=4) is not ways._untold


@pytest.mark.parametrize("full", [9, 13])
def test_none_whose_bits_differ_for_those(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    def splits(x: Tensor, *rest: Any) -> Tensor:
        return linear(x, *rest) + float(len(x) == 3)

    monkeypatch.setattr(ways, "FULL", full)
    for name in ("_untold", "_whole"):
        monkeypatch.setattr(ways, name, splits)
    gpu.kernels.few_rows = other
    assert taken(rows=4) is own


def test_rows_of_one_way_have_tiles_of_one_height() -> None:
    """Those of `few_rows` and of vLLM's kernel are as high as the next power of two."""
    ways_of: dict[int, set[int]] = {}
    for rows in range(1, 1025):
        ways_of.setdefault(ways._doublings(rows), set()).add(1 << (rows - 1).bit_length())
    assert all(len(heights) == 1 for heights in ways_of.values())
    assert ways._doublings(ways.FEW) < ways._doublings(ways.FEW + 1)


def test_nothing_is_learned_from_no_rows() -> None:
    x = torch.ones(0, 4, dtype=torch.bfloat16)
    assert ways.linear(own, x, WIDE).shape == (0, 3)
    assert ways.norm_heads(lambda x, weight, eps: x, x[:, None], WIDE[0], 1e-6).shape == (0, 1, 4)
    assert not ways._WAYS


def test_trials_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    ways._stream.cache_clear()
    try:
        assert ways._stream(0) is ways._stream(0)
        assert ways._stream(0) is not ways._stream(1)
    finally:
        ways._stream.cache_clear()


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


@pytest.mark.parametrize("rows", [2, ways.FEW + 1])
@pytest.mark.parametrize("given", [0.0, 1.0])
def test_trials_are_of_random_numbers(
    monkeypatch: pytest.MonkeyPatch, given: float, rows: int
) -> None:
    """An engine's first steps are of sequences that are all alike, and attention of the one that
    measures memory gives zeros: a sum of equal numbers is the same in any order."""
    monkeypatch.setattr(ways, "_whole", lambda x, *rest: linear(x, *rest) + float(x.std() > 0.5))
    ways.linear(own, torch.full((rows, 4), given, dtype=torch.bfloat16), WIDE)
    assert ways._whole not in ways._WAYS.values()


def test_biases_of_zero_are_tried_as_others(gpu: SimpleNamespace) -> None:
    gpu.kernels.few_rows = lambda x, weight, bias: linear(x, weight) + 2 * bias
    ways.linear(own, WIDE, WIDE, torch.zeros(3, dtype=torch.bfloat16))
    assert list(ways._WAYS.values()) == [ways._whole]


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
