"""Faster variants of vLLM's batch-invariant kernels that return exactly the same bits.

Each variant is compared with vLLM's kernel before it is used. Engines and the trainer run the same
code (`keel.rollout.engine.patches`, `keel.model.batch_invariant.vllm_kernels`). They may pick
different variants, because all variants are bit-identical.
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
_Norm = Callable[[Tensor, Tensor, float], Tensor]

HOPPER = 9
"""Major compute capability of the GPUs on which the GEMMs were tested."""
FEW = 512
"""Maximum number of rows for which narrow tiles are tried. It is meant for decoding steps, which
have few rows."""
MOST = 8192
"""Maximum number of rows in a trial. The outputs for a whole micro-batch would take gigabytes."""
FULL = 128 * 128 * 132
"""A GEMM with at least this many outputs has enough tiles to fill the GPU, so cuBLAS does not split
K on its own. Explicitly forbidding the split would cost about 400 µs per call on the host,
apparently for an algorithm search."""
_TRIALS, CALLS = 3, 8
"""Number of timed runs of each bit-identical variant, and the number of calls in each run."""

_CHOICES: dict[Any, Any] = {}
"""The function chosen for each operation and shape. The number of rows is rounded up to a power of
two."""


def linear(local: Linear, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x [N, K] · weightᵀ [K, M] + bias [M] → [N, M]. The result is bit-identical to that of
    `local`, vLLM's kernel. On Hopper, cuBLAS sums in the same order as vLLM's kernel unless it
    splits K, and it is faster. It would split K if there are few rows and the matrix is narrow and
    deep. In that case, a kernel with narrow tiles is faster."""
    kind = (x.device, x.dtype, weight.shape, bias is None, _doublings(len(x)))
    chosen: Linear | None = _CHOICES.get(kind)
    if chosen is None:
        if not len(x) or torch.cuda.is_current_stream_capturing():  # no comparison is possible
            return local(x, weight, bias)
        chosen = _CHOICES[kind] = _choose_linear(local, x, weight, bias)
    return chosen(x, weight, bias)


def norm_heads(local: _Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute weight [D] · x / rms(x) over the last dimension of x [N, H, D]. The result is
    bit-identical to that of `local`, vLLM's kernel, which needs a contiguous copy of x."""
    kind = (x.device, x.dtype, x.shape[1:], eps)
    chosen: _Norm | None = _CHOICES.get(kind)
    if chosen is None:
        if not len(x) or torch.cuda.is_current_stream_capturing():
            return local(x, weight, eps)
        from keel.model.batch_invariant import kernels  # noqa: PLC0415  (Triton)

        trial = _random(x[:FEW])  # tokens are independent
        same = torch.equal(local(trial, weight, eps), kernels.norm_heads(trial, weight, eps))
        chosen = _CHOICES[kind] = kernels.norm_heads if same else local
    return chosen(x, weight, eps)


def _choose_linear(local: Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Linear:
    half = x.dtype in (torch.bfloat16, torch.float16)
    if not half or torch.cuda.get_device_capability(x.device)[0] != HOPPER:
        return local
    few, fewest = len(x) <= FEW, (1 << _doublings(len(x))) // 2 + 1
    # Random inputs: an engine's first calls have identical rows, or zeros after attention.
    trial, bias = _random(x[:MOST]), None if bias is None else _random(bias)
    expected = local(trial, weight, bias)

    def same(variant: Linear) -> bool:
        """Return whether the variant is bit-identical, also for the smallest number of rows. cuBLAS
        chooses tiles by the number of rows."""
        return torch.equal(expected, variant(trial, weight, bias)) and torch.equal(
            expected[:fewest], variant(trial[:fewest], weight, bias)
        )

    if fewest * len(weight) >= FULL and same(_default):
        return _default
    variants = [_without_split_k]
    if few:
        from keel.model.batch_invariant import kernels  # noqa: PLC0415  (Triton)

        variants.append(kernels.few_rows)
    variants = [variant for variant in variants if same(variant)]
    if len(variants) < 2:
        return variants[0] if variants else local
    return min(variants, key=lambda variant: _seconds(lambda: variant(trial, weight, bias)))


def _seconds(call: Callable[[], object]) -> float:
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
        for _ in range(_TRIALS):
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
    """Return the stream that all trials share, because cuBLAS reserves 32 MiB per stream on
    Hopper."""
    return torch.cuda.Stream(device)


def _doublings(rows: int) -> int:
    """Return ⌈log2(rows)⌉. Kernels change their tile height just above powers of two."""
    return max(0, rows - 1).bit_length()


def _random(x: Tensor) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(0)
    return torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)


def _without_split_k(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with _cublaslt(x.dtype, splits=False):
        return functional.linear(x, weight, bias)


def _default(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with _cublaslt(x.dtype, splits=True):
        return functional.linear(x, weight, bias)


@contextmanager
def _cublaslt(dtype: torch.dtype, *, splits: bool) -> Iterator[None]:
    """Run GEMMs inside this context with cuBLASLt, and allow or forbid it to split K."""
    matmul = torch.backends.cuda.matmul
    knob = f"allow_{'bf16' if dtype == torch.bfloat16 else 'fp16'}_reduced_precision_reduction"
    before = getattr(matmul, knob), getattr(matmul, f"{knob}_split_k")
    library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    setattr(matmul, knob, (splits, splits))  # for sums and for splitting K
    try:
        yield
    finally:
        setattr(matmul, knob, before)
        torch.backends.cuda.preferred_blas_library(library)
