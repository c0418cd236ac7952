"""Computes gradients for the engine's kernels from plain formulas in float32."""

from __future__ import annotations

from torch import Tensor

from keel.model.attention import Segments
from keel.model.torch_internals import flash_gradients


def rms_norm(x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight · x / rms(x) for x [N, H, D] and weight [D]."""
    from keel.model.batch_invariant.kernels import rms_norm_grad  # noqa: PLC0415  (Triton)

    return rms_norm_grad(x, weight, eps, grad)


def swiglu(packed: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of silu(first half) · second half for the packed input [N, 2·I]."""
    from keel.model.batch_invariant.kernels import swiglu_grad  # noqa: PLC0415  (Triton)

    return swiglu_grad(packed, grad)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    segments: Segments,
    scale: float,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients for query [N, Hq, D] and for key and value [N, Hkv, D].

    `out` and `sums` are the results of `keel.model.batch_invariant.vllm_kernels.attention`. The
    gradients come from PyTorch's flash kernels, whose own forward pass differs from the engine's
    only by rounding.
    """
    return flash_gradients(
        grad, query, key, value, out, sums, segments.offsets, segments.longest, scale
    )
