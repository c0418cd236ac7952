"""vLLM's FlashAttention, and in steps that only decode `kernels`: a prompt's keys and
values are read once for the rows of its group.

It takes the place of vLLM's backend of that name by vLLM's own registry. Whatever the kernels do
not cover (prompts, sliding windows, sinks, caches in fewer bits, ...) goes vLLM's way.
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

from keel.rollout.vllm_fast.cascade.kernels import attend
from keel.rollout.vllm_fast.cascade.plan import Heads, Scratch, plan


class Step(Scratch):
    """Of a step that only decodes."""

    first: object = None
    """The layer that comes first, which plans for all: in a graph as well."""


@dataclass
class CascadeMetadata(FlashAttentionMetadata):
    """Of a step that only decodes, in which `kernels` are used."""

    step: Step | None = None


class CascadeBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return CascadeImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return CascadeBuilder


class CascadeBuilder(FlashAttentionMetadataBuilder):
    _step: Step | None = None
    _looked = False
    """Whether it is known if the layers are such that the kernels cover them."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        made = common_attn_metadata
        if not self._looked:
            self._step, self._looked = self._made(), True
        if (
            self._step is None
            or made.max_query_len != 1
            or made.causal is not True
            or made.num_actual_tokens != made.num_reqs
        ):
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        return CascadeMetadata(
            num_actual_tokens=made.num_actual_tokens,
            max_query_len=made.max_query_len,
            query_start_loc=made.query_start_loc,
            max_seq_len=made.max_seq_len,
            seq_lens=made.seq_lens,
            block_table=made.block_table_tensor,
            slot_mapping=made.slot_mapping,
            step=self._step,
        )

    def _made(self) -> Step | None:
        """None: the kernels do not cover these layers."""
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        heads = Heads(self.num_heads_q, self.num_heads_kv, self.headdim, self.block_size)
        mode = self.compilation_config.cudagraph_mode
        if (
            # Graphs of steps with prompts would take those that only decode, too.
            (mode.has_full_cudagraphs() and not mode.separate_routine())
            or self.dcp_world_size > 1
            or self.rswa_window is not None
            or self.model_config.is_mm_prefix_lm
            or not heads.covered
            or self.kv_cache_dtype not in (torch.bfloat16, torch.float16)
            or len(layers) != len(self.layer_names)
            or not all(_plain(layer.impl) for layer in layers.values())
        ):
            return None
        rows = max(self.vllm_config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0)
        return Step(heads, rows, self.device)


def _plain(impl: Any) -> bool:
    """Whether a layer's attention is softmax over all that came before, and nothing else."""
    return (
        type(impl) is CascadeImpl
        and impl.attn_type == AttentionType.DECODER
        and impl.sliding_window == (-1, -1)
        and impl.alibi_slopes is None
        and impl.sinks is None
        and not impl.logits_soft_cap
        and not impl.batch_invariant_enabled
        and impl.kv_cache_dtype in ("auto", "bfloat16", "float16")
    )


class CascadeImpl(FlashAttentionImpl):
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
                f"blocks of {kv_cache.shape[2]} tokens where vLLM said {step.heads.page}: set "
                "rollout.cascade_attention to false"
            )
        table, lengths = attn_metadata.block_table, attn_metadata.seq_lens
        if step.first is None:
            step.first = layer
        if step.first is layer:
            plan(step, table, lengths)
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        attend(step, query, keys, values, table, lengths, self.scale, output)
        return output


def install(*, wanted: bool) -> None:
    """Take the place of vLLM's own, or give it back, for engines that are built in this process
    from now on."""
    if wanted:
        where = f"{CascadeBackend.__module__}.{CascadeBackend.__name__}"
        register_backend(AttentionBackendEnum.FLASH_ATTN, where)
    else:
        AttentionBackendEnum.FLASH_ATTN.clear_override()
    _cached_get_attn_backend.cache_clear()
