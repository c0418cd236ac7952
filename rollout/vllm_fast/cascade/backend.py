"""Extends vLLM's FlashAttention backend to use `kernels` in steps that only decode.

In these steps, the keys and values of a prompt are read once for all rows of its group. This
backend replaces vLLM's own through vLLM's registry. vLLM still computes everything that the kernels
do not support (prompts, sliding windows, sinks, quantised caches, …).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from keel.rollout.vllm_fast.cascade.kernels import Heads, Scratch, attend, plan


class _CascadeStep(Scratch):
    """State that all layers share in a step that only decodes."""

    first: object = None
    """The first layer. It plans the step for all layers, even inside a CUDA graph."""


@dataclass
class _CascadeMetadata(FlashAttentionMetadata):
    """Attention metadata of a step that uses `kernels`."""

    step: _CascadeStep | None = None


class _CascadeBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return _CascadeImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return _CascadeBuilder


class _CascadeBuilder(FlashAttentionMetadataBuilder):
    _step: _CascadeStep | None = None
    """State shared by the layers. None if the kernels do not support them."""
    _inspected = False

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        common = common_attn_metadata
        if not self._inspected:
            self._step, self._inspected = self._make_step(), True
        if (
            self._step is None
            or common.max_query_len != 1
            or common.causal is not True
            or common.num_actual_tokens != common.num_reqs
        ):
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        return _CascadeMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            step=self._step,
        )

    def _make_step(self) -> _CascadeStep | None:
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        heads = Heads(self.num_heads_q, self.num_heads_kv, self.headdim, self.block_size)
        mode = self.compilation_config.cudagraph_mode
        if (
            # Graphs of steps with prompts would also run steps that only decode.
            (mode.has_full_cudagraphs() and not mode.separate_routine())
            or self.rswa_window is not None
            or self.model_config.is_mm_prefix_lm
            or not heads.covered
            or self.kv_cache_dtype not in (torch.bfloat16, torch.float16)
            or len(layers) != len(self.layer_names)
            or not all(_plain(layer.impl) for layer in layers.values())
        ):
            return None
        rows = max(self.vllm_config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0)
        return _CascadeStep(heads, rows, self.device)


def _plain(impl: Any) -> bool:
    """Return True if a layer computes ordinary causal softmax attention."""
    return (
        type(impl) is _CascadeImpl
        and impl.attn_type == AttentionType.DECODER
        and impl.sliding_window == (-1, -1)
        and impl.alibi_slopes is None
        and impl.sinks is None
        and not impl.logits_soft_cap
        and not impl.batch_invariant_enabled
        and impl.kv_cache_dtype in ("auto", "bfloat16", "float16")
    )


class _CascadeImpl(FlashAttentionImpl):
    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        step = getattr(attn_metadata, "step", None)
        if step is None or output_scale is not None or output_block_scale is not None:
            return super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if kv_cache.shape[2] != step.heads.page:
            raise RuntimeError(
                f"KV blocks have {kv_cache.shape[2]} tokens, but vLLM announced {step.heads.page}. "
                "Set rollout.cascade_attention to false"
            )
        table, lengths = attn_metadata.block_table, attn_metadata.seq_lens
        if step.first is None:
            step.first = layer
        if step.first is layer:
            plan(step, table, lengths)
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        attend(step, query, keys, values, table, lengths, self.scale, output)
        return output


def install(*, enabled: bool) -> None:
    """Replace or restore vLLM's attention backend. This affects engines built later in this
    process."""
    if enabled:
        where = f"{_CascadeBackend.__module__}.{_CascadeBackend.__name__}"
        register_backend(AttentionBackendEnum.FLASH_ATTN, where)
    else:
        AttentionBackendEnum.FLASH_ATTN.clear_override()
    _cached_get_attn_backend.cache_clear()
