"""Gradients of the engine's kernels, from plain formulas in float32."""

from __future__ import annotations

from torch import Tensor

from keel.model.attention import Segments
from keel.model.torch_internals import flash_gradients


def rms_norm(x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [N, H, D] and weight [D] for weight · x / rms(x)."""
    from keel.model.batch_invariant.kernels import rms_norm_grad  # noqa: PLC0415  (Triton)

    return rms_norm_grad(x, weight, eps, grad)


def swiglu(packed: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of packed [N, 2·I] for silu of the first half · the second."""
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
    """Return the gradients of query [N, Hq, D], key and value [N, Hkv, D].

    `out` and `sums` are from `keel.model.batch_invariant.vllm_kernels.attention`. PyTorch's flash
    kernels compute the gradients; their forward pass would only differ by rounding.
    """
    return flash_gradients(
        grad, query, key, value, out, sums, segments.offsets, segments.longest, scale
    )
