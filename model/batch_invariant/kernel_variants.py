"""Faster ways to the bits of vLLM's batch-invariant kernels, each compared with them before it is
taken. Engines and the trainer go the same ones (`keel.rollout.engine.patches`,
`keel.model.batch_invariant.vllm_kernels`), and need not: what is taken gives the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Norm = Callable[[Tensor, Tensor, float], Tensor]

HOPPER = 9
"""Compute capability, its first number, of the GPUs on which GEMMs have been compared."""
FEW = 512
"""Rows up to which narrow tiles are tried: those of a decoding step."""
MOST = 8192
"""Rows of a trial, at the most: of all in a trainer's micro-batch the outputs of two ways would be
gigabytes that no plan knows of."""
FULL = 128 * 128 * 132
"""Outputs of a GEMM whose tiles keep all of the GPU busy: cuBLAS has no reason to split K, and need
not be told. Being told, a call took some 400 µs of the host, by samples of one run: it seems to
look for an algorithm each time."""
TRIALS, CALLS = 3, 8
"""Of two ways that give the same bits, to see which is faster."""

_WAYS: dict[Any, Any] = {}
"""Kind and shape of a call, with rows up to a power of two → what computes it."""


def linear(own: Linear, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, K] · weightᵀ [K, M] + bias [M] → [N, M], with the bits of `own`.

    Told not to split K, cuBLAS adds up in the order of vLLM's kernel on Hopper, and is faster. But
    where it would split K, for a few rows of a narrow and deep matrix, it is much slower without:
    there a kernel with narrow tiles is what is fast.
    """
    kind = (x.device, x.dtype, weight.shape, bias is None, _doublings(len(x)))
    way: Linear | None = _WAYS.get(kind)
    if way is None:
        if not len(x) or torch.cuda.is_current_stream_capturing():  # nothing can be compared now
            return own(x, weight, bias)
        way = _WAYS[kind] = _way_of(own, x, weight, bias)
    return way(x, weight, bias)


def norm_heads(own: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight [D] · x / rms(x) over the last dimension of x [N, H, D], with the bits of `own`, which
    copies what has gaps between its tokens."""
    kind = (x.device, x.dtype, x.shape[1:], eps)
    way: Norm | None = _WAYS.get(kind)
    if way is None:
        if not len(x) or torch.cuda.is_current_stream_capturing():
            return own(x, weight, eps)
        from keel.model.batch_invariant import kernels  # noqa: PLC0415  (Triton)

        tried = _random(x[:FEW])  # each token by itself
        same = torch.equal(own(tried, weight, eps), kernels.norm_heads(tried, weight, eps))
        way = _WAYS[kind] = kernels.norm_heads if same else own
    return way(x, weight, eps)


def _way_of(own: Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Linear:
    half = x.dtype in (torch.bfloat16, torch.float16)
    if not half or torch.cuda.get_device_capability(x.device)[0] != HOPPER:
        return own
    few, fewest = len(x) <= FEW, (1 << _doublings(len(x))) // 2 + 1
    # An engine's first calls are of sequences that are all alike, behind attention even of zeros.
    tried, bias = _random(x[:MOST]), None if bias is None else _random(bias)
    wanted = own(tried, weight, bias)

    def same(way: Linear) -> bool:
        """For the fewest rows that will go it, too: cuBLAS chooses its tiles by their number."""
        return torch.equal(wanted, way(tried, weight, bias)) and torch.equal(
            wanted[:fewest], way(tried[:fewest], weight, bias)
        )

    if fewest * len(weight) >= FULL and same(_untold):
        return _untold
    ways = [_whole]
    if few:
        from keel.model.batch_invariant import kernels  # noqa: PLC0415  (Triton)

        ways.append(kernels.few_rows)
    ways = [way for way in ways if same(way)]
    if len(ways) < 2:
        return ways[0] if ways else own
    return min(ways, key=lambda way: _seconds(lambda: way(tried, weight, bias)))


def _seconds(call: Callable[[], object]) -> float:
    """The GPU's alone, as in an engine's CUDA graphs: of some calls in a row, at the least."""
    graph, stream = torch.cuda.CUDAGraph(), _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    best = float("inf")
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(CALLS):
            call()
        graph.capture_end()
        for _ in range(TRIALS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1000)
    torch.cuda.current_stream().wait_stream(stream)
    return best


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """The same for all trials: cuBLAS keeps a workspace for each that it has been called on, 32 MiB
    on Hopper."""
    return torch.cuda.Stream(device)


def _doublings(rows: int) -> int:
    """Of 1 up to `rows` or more. All rows of one number have tiles of one height: kernels change
    theirs behind powers of two."""
    return max(0, rows - 1).bit_length()


def _random(x: Tensor) -> Tensor:
    """Numbers for a trial in the shape of x, by a generator of their own."""
    generator = torch.Generator(x.device).manual_seed(0)
    return torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)


def _whole(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with _cublaslt(x.dtype, splits=False):
        return functional.linear(x, weight, bias)


def _untold(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with _cublaslt(x.dtype, splits=True):
        return functional.linear(x, weight, bias)


@contextmanager
def _cublaslt(dtype: torch.dtype, *, splits: bool) -> Iterator[None]:
    """GEMMs by cuBLASLt, which may split K, or not."""
    matmul = torch.backends.cuda.matmul
    knob = f"allow_{'bf16' if dtype == torch.bfloat16 else 'fp16'}_reduced_precision_reduction"
    before = getattr(matmul, knob), getattr(matmul, f"{knob}_split_k")
    library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    setattr(matmul, knob, (splits, splits))  # of sums, and of splitting K
    try:
        yield
    finally:
        setattr(matmul, knob, before)
        torch.backends.cuda.preferred_blas_library(library)
