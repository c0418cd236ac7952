"""vLLM's batch-invariant layers by kernels that give the same bits sooner
(`keel.model.batch_invariant.kernel_variants`): its GEMM has tiles for large batches in all but
five shapes, so that
a decoding step reads its weights with a few of the GPU's cores; and norms of heads copy them first.

Where layers call them is no extension point of vLLM's: its registry replaces whole layers, whose
weights its loader would not know.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers import layernorm, linear

from keel.model.batch_invariant import kernel_variants as ways
from keel.rollout.vllm_pin import check_parameters

norms: Any = layernorm
gemms: Any = linear
_linear: ways.Linear = gemms.linear_batch_invariant
_rms_norm: Any = norms.rms_norm_batch_invariant


def install() -> None:
    """Replace the kernels for engines built in this process from now on."""
    check_parameters(_linear, "input weight bias")
    check_parameters(_rms_norm, "input weight eps residual")
    gemms.linear_batch_invariant = _linear_sooner
    norms.rms_norm_batch_invariant = _rms_norm_sooner


def _linear_sooner(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = ways.linear(_linear, input.reshape(-1, input.shape[-1]), weight, bias)
    return out.view(*input.shape[:-1], out.shape[-1])


def _rms_norm_sooner(
    input: Tensor, weight: Tensor | None, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    if residual is None and weight is not None and input.ndim == 3:  # heads
        return ways.norm_heads(_rms_norm, input, weight, eps)
    return _rms_norm(input, weight, eps, residual=residual)
