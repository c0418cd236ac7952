"""Fixes for bugs in the CPU build of vLLM 0.32."""

import inspect
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus
from transformers.models.qwen3_next import modeling_qwen3_next
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

_recurrent: Any = inspect.unwrap(modeling_qwen3_next.torch_recurrent_gated_delta_rule)
_chunked: Any = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)


def install() -> None:
    """Apply the fixes in this module to vLLM's classes, once per process."""
    for kind, name, shim in (
        (UnquantizedFusedMoEMethod, "_setup_kernel", _prepack_experts),
        (RotaryEmbedding, "forward_cpu", _rotate_3d_queries),
        (CPUModelRunner, "sample_tokens", _keep_seeded_streams),
        (gdn_attention, "cpu_gdn_attention_core", _gated_delta_rule),
    ):
        original = getattr(kind, name)
        if not hasattr(original, "keel_shim"):
            patched: Any = wraps(original)(shim(original))
            patched.keel_shim = True
            setattr(kind, name, patched)


def _prepack_experts(original: Any) -> Any:
    """Also repack expert weights for the CPU kernel after weight updates. Otherwise, the kernel
    would treat unpacked weights as packed ones, and every expert would silently be wrong."""

    def setup_kernel(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        updating, before = self.moe_kernel is not None, layer.w13_weight
        original(self, layer, w13, w2)
        # Packing replaces the parameter; an unchanged one was not packed.
        if updating and layer.w13_weight is before:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return setup_kernel


def _rotate_3d_queries(original: Any) -> Any:
    """Rotate queries of shape [T, heads, D] (multi-head latent attention) with torch. vLLM's CPU
    kernel mixes up their heads if the rotation is interleaved."""

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        if query.dim() == 3:
            return self.forward_native(positions, query, key)
        return original(self, positions, query, key)

    return forward_cpu


def _keep_seeded_streams(original: Any) -> Any:
    """Make a seeded request draw random numbers only for the tokens that it keeps.

    After each prefill chunk, vLLM samples a token, discards it and rewinds the generator. CPU
    generators cannot be rewound, so completions would depend on how their prompts were split.
    """

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


def _gated_delta_rule(original: Any) -> Any:
    """Compute the gated delta rule in dtypes other than bfloat16 and with heads of other sizes than
    64 and 128, which vLLM's CPU kernels don't support."""

    def core(
        mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType
    ) -> None:
        context: Any = get_forward_context()
        if context.attn_metadata is None:  # a warm-up
            return None
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        supported = layer.head_k_dim == layer.head_v_dim and layer.head_k_dim in (64, 128)
        if mixed_qkv.dtype == torch.bfloat16 and supported:
            return original(mixed_qkv, b, a, core_attn_out, layer_name)
        batch = context.attn_metadata[layer.prefix]
        ends, slots = batch.non_spec_query_start_loc, batch.non_spec_state_indices_tensor
        decodes, sequences = batch.num_decodes, batch.num_decodes + batch.num_prefills
        begun = batch.has_initial_state
        rows = mixed_qkv, b, a, core_attn_out
        if decodes:
            _process_tokens(layer, slots[:decodes], None, *(x[:decodes] for x in rows))
        for i in range(decodes, sequences):
            own, tokens = slice(i, i + 1), slice(int(ends[i]), int(ends[i + 1]))
            _process_tokens(layer, slots[own], begun[own], *(x[tokens] for x in rows))
        return None

    return core


def _process_tokens(
    layer: Any,
    slots: Tensor,
    begun: Tensor | None,
    mixed_qkv: Tensor,
    b: Tensor,
    a: Tensor,
    output: Tensor,
) -> None:
    """Process the next tokens of sequences of equal length, and update their states in the cache. A
    state starts at zero where `begun` is False."""

    def grouped(x: Tensor) -> Tensor:  # [N, …] → [S, T, …]
        return x.unflatten(0, (len(slots), -1))

    convolved, recurrent = layer.kv_cache[:2]
    recurrent = recurrent.view(*recurrent.shape[:2], *recurrent.shape[:1:-1])  # keys first
    if not is_conv_state_dim_first():
        convolved = convolved.transpose(1, 2)
    before, state = convolved[slots], recurrent[slots]
    if begun is not None:
        fresh = ~begun[:, None, None]
        before, state = before.masked_fill(fresh, 0), state.masked_fill(fresh[..., None], 0)
    row = torch.cat([before, grouped(mixed_qkv).transpose(1, 2)], -1)  # [S, C, W−1+T]
    convolved[slots] = row[..., -before.shape[-1] :]
    weight = gdn_attention._unpacked_conv_weight(layer)[:, None]
    row = silu(conv1d(row, weight, layer.conv1d.bias, groups=len(weight))).transpose(1, 2)
    query, key, value = (grouped(x[0]) for x in layer.rearrange_mixed_qkv(row.flatten(0, 1)))
    shared = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(shared, 2) for x in (query, key))
    rule = _recurrent if query.shape[1] == 1 else _chunked
    out, state = rule(
        *(query, key, value),
        g=-layer.A_log.exp() * softplus(grouped(a) + layer.dt_bias),
        beta=grouped(b).sigmoid(),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    recurrent[slots] = state.to(recurrent.dtype)
    output.copy_(out.flatten(0, 1))
