"""Makes vLLM on a CPU keep weights in the tensors into which they were loaded, as on a GPU.

vLLM's CPU build normally packs the weights, and copying into them does not update the packed ones.
The model is slow without packing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Patch vLLM. Call this before building an engine."""
    import vllm.model_executor.layers.utils as layers  # noqa: PLC0415
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (  # noqa: PLC0415
        CPUUnquantizedExperts,
    )

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = keep  # type: ignore[assignment]
    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None  # type: ignore[method-assign]
    CPUUnquantizedExperts.apply = _experts  # type: ignore[method-assign]


def _experts(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    **_: Any,
) -> None:
    """Compute `output` [T, H] from the hidden states [T, H], w1 [E, 2I, H] and w2 [E, H, I]. The
    other arguments are [T, K]."""
    output.zero_()
    for expert in range(len(w1)):
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = (hidden_states[token] @ w1[expert].t()).chunk(2, -1)
        result = (torch.nn.functional.silu(gate) * up) @ w2[expert].t()
        output.index_add_(0, token, (result * topk_weights[token, slot, None]).to(output.dtype))
