"""The kernels of vLLM's batch-invariant mode (0.32), called in the same way as vLLM's Qwen2, Qwen3
and Llama models call them.

This is the only place where the trainer uses vLLM. Each kernel returns the same bits for a token in
any batch: GEMMs sum over K in a fixed order, attention processes keys in blocks of a fixed size,
and norms do not choose their threads by the number of rows. A forward pass over a whole sequence
therefore returns the same bits as an engine that decodes it token by token.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from keel.model.attention import Segments
from keel.model.batch_invariant import BLOCK, VARIABLE, kernel_variants


class Unavailable(RuntimeError):
    """Raised if vLLM's batch-invariant kernels are not available."""


def prepare() -> None:
    """Load all kernels. Raises Unavailable if one is missing."""
    if os.environ.get(VARIABLE) != "1":
        raise Unavailable(f"set {VARIABLE}=1 in the environment before this process starts")
    try:
        kernels = _kernels()
    except (ImportError, AttributeError, KeyError) as error:
        raise Unavailable(
            f"model.batch_invariant: vLLM has no batch-invariant kernels here ({error}). Install "
            "its CUDA build of 0.32, or remove the knob"
        ) from error
    if kernels.flash_version is None:
        raise Unavailable("model.batch_invariant: vLLM has no flash attention for this GPU")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x [N, K] · weightᵀ [K, M] + bias [M] → [N, M]."""
    return kernel_variants.linear(_kernels().linear, x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute weight · x / rms(x) over the last dimension of x [N, H, d]. Use `rms_norm_of_sum` for
    a residual sum."""
    return kernel_variants.norm_heads(_kernels().rms_norm, x, weight, eps)


def rms_norm_of_sum(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute the norm of a residual sum x [N, 1, d]. The engine adds and normalises in one kernel,
    which rounds the sum. Adding 0 to the rounded sum gives the same result."""
    normed = torch.zeros_like(x, memory_format=torch.contiguous_format)
    # The kernel writes the sum to x in place; `.data` hides that from autograd.
    _kernels().fused_add_rms_norm(normed, x.contiguous().data, weight, eps)
    return normed


def rotate(positions: Tensor, x: Tensor, table: Tensor) -> None:
    """Rotate contiguous x [N, H, D] in place. Takes the positions [N] and a table [P, R] from
    `rotary_table`."""
    _kernels().rotary_embedding(positions, x.flatten(1), None, x.shape[-1], table, True)


def silu_and_mul(packed: Tensor) -> Tensor:
    """Compute silu(first half) · second half for the packed input [N, 2·I]. Returns [N, I]."""
    out = packed.new_empty(packed.shape[0], packed.shape[1] // 2)
    _kernels().silu_and_mul(out, packed)
    return out


def attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within each segment. Takes query [N, Hq, D] and key and value [N,
    Hkv, D]. Returns the outputs [N, Hq, D] and the logsumexps [Hq, N] float32. Keys and values are
    copied into blocks like those in the engine's cache, so that the same kernel is selected."""
    pages = _pages(segments.lengths, query.device)
    kernels = _kernels()
    return kernels.flash_attention(
        q=query.contiguous(),
        k=pages.lay_out(key),
        v=pages.lay_out(value),
        cu_seqlens_q=segments.offsets,
        max_seqlen_q=segments.longest,
        seqused_k=pages.lengths,
        max_seqlen_k=segments.longest,
        softmax_scale=scale,
        causal=True,
        block_table=pages.table,
        return_softmax_lse=True,
        fa_version=kernels.flash_version,
        num_splits=1,
    )


@dataclass(frozen=True)
class Pages:
    """Arrangement of packed segments in blocks of `BLOCK` tokens. No block is shared by two
    segments."""

    lengths: Tensor
    """[S] int32."""
    rows: Tensor
    """[N] the row within the blocks that holds each token."""
    table: Tensor
    """[S, max] int32, the blocks of each segment in order."""
    blocks: int

    @staticmethod
    def of(lengths: tuple[int, ...], device: torch.device) -> Pages:
        sizes = torch.tensor(lengths)
        blocks = -(-sizes // BLOCK)
        first = blocks.cumsum(0) - blocks
        starts = sizes.cumsum(0) - sizes
        shift = first * BLOCK - starts
        rows = torch.arange(int(sizes.sum())) + torch.repeat_interleave(shift, sizes)
        count = int(blocks.sum())
        table = (first[:, None] + torch.arange(int(blocks.max()))).clamp(max=count - 1)
        return Pages(
            sizes.to(device, torch.int32), rows.to(device), table.to(device, torch.int32), count
        )

    def lay_out(self, x: Tensor) -> Tensor:
        """Copy packed tokens [N, H, D] into blocks [blocks, BLOCK, H, D]."""
        pages = x.new_zeros(self.blocks * BLOCK, *x.shape[1:])
        return pages.index_copy_(0, self.rows, x).unflatten(0, (-1, BLOCK))


_pages = lru_cache(maxsize=2)(Pages.of)


def rotary_table(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the table of cosines and sines, [positions, R] in `dtype`, computed as in the engine.
    The cosines come first."""
    from vllm.config import VllmConfig, set_current_vllm_config  # noqa: PLC0415
    from vllm.model_executor.layers.rotary_embedding import get_rope  # noqa: PLC0415

    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    with set_current_vllm_config(VllmConfig()), torch.device(device):
        rope = get_rope(
            size,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
            dtype=dtype,
        )
    return rope.cos_sin_cache.to(device, dtype)


class _Kernels:
    def __init__(self) -> None:
        import vllm._custom_ops as operators  # noqa: PLC0415
        from vllm.model_executor.determinism import batch_invariant as own  # noqa: PLC0415
        from vllm.model_executor.determinism import batch_invariant_configs  # noqa: PLC0415
        from vllm.v1.attention.backends import fa_utils  # noqa: PLC0415

        batch_invariant_configs.resolve_tuned_matmul_configs()
        self.linear: Any = own.linear_batch_invariant
        self.rms_norm: Any = own.rms_norm_batch_invariant
        self.fused_add_rms_norm: Any = operators.fused_add_rms_norm
        self.rotary_embedding: Any = operators.rotary_embedding
        self.silu_and_mul: Any = torch.ops._C.silu_and_mul
        self.flash_attention: Any = vars(fa_utils)["flash_attn_varlen_func"]
        self.flash_version: int | None = fa_utils.get_flash_attn_version()


_kernels = cache(_Kernels)
