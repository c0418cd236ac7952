"""Gradients of what the engine's kernels compute, by plain formulas in float32."""

from __future__ import annotations

from torch import Tensor

from keel.model.attention import Segments
from keel.model.torch_internals import flash_gradients


def rms_norm(x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Of x [N, H, D] and weight [D], where weight · x / rms(x) has `grad` [N, H, D]."""
    from keel.model.batch_invariant.kernels import rms_norm_grad  # noqa: PLC0415  (Triton)

    return rms_norm_grad(x, weight, eps, grad)


def swiglu(packed: Tensor, grad: Tensor) -> Tensor:
    """Of packed [N, 2·I], where silu of its first half · its second has `grad` [N, I]."""
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
    """Of query [N, Hq, D], key and value [N, Hkv, D], where `out`, of
    `keel.model.batch_invariant.vllm_kernels.attention` with `sums`, has `grad`: by PyTorch's flash
    kernels, which would have computed the same forward pass to their rounding."""
    return flash_gradients(
        grad, query, key, value, out, sums, segments.offsets, segments.longest, scale
    )
