"""Fixes for bugs in the CPU build of vLLM 0.32."""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def install() -> None:
    """Patch vLLM's classes, once per process."""
    for kind, name, shim in (
        (UnquantizedFusedMoEMethod, "_setup_kernel", _prepack_experts),
        (RotaryEmbedding, "forward_cpu", _rotate_3d_queries),
        (CPUModelRunner, "sample_tokens", _keep_seeded_streams),
    ):
        original = getattr(kind, name)
        if not hasattr(original, "keel_shim"):
            patched: Any = wraps(original)(shim(original))
            patched.keel_shim = True
            setattr(kind, name, patched)


def _prepack_experts(original: Any) -> Any:
    """Pack expert weights for the CPU kernel each time weights are loaded. vLLM does not do this
    when weights are updated. The kernel would then read unpacked weights as packed ones, and every
    expert would silently compute wrong results."""

    def setup_kernel(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        updating, before = self.moe_kernel is not None, layer.w13_weight
        original(self, layer, w13, w2)
        # Packing replaces the parameter; an unchanged one was not packed.
        if updating and layer.w13_weight is before:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return setup_kernel


def _rotate_3d_queries(original: Any) -> Any:
    """Apply rotary embeddings correctly to queries of shape [T, heads, D] (multi-head latent
    attention). vLLM's CPU kernel mixes up the heads of a 3-D query if the rotation is interleaved.
    The torch implementation does not."""

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        if query.dim() == 3:
            return self.forward_native(positions, query, key)
        return original(self, positions, query, key)

    return forward_cpu


def _keep_seeded_streams(original: Any) -> Any:
    """Make a seeded request draw random numbers only for the tokens that it keeps. During a chunked
    prefill, vLLM samples a token after every chunk, discards it and rewinds the request's random
    generator. CPU generators cannot be rewound, so completions would depend on how their prompts
    were split into chunks. This patch sets the generators aside during such steps."""

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        batch = self.input_batch
        discarded = np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs])
        generators = batch.generators
        aside = {row: generators.pop(row) for row in discarded.tolist() if row in generators}
        try:
            return original(self, grammar_output)
        finally:
            generators.update(aside)

    return sample_tokens
