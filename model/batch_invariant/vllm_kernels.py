"""Kernels of vLLM's batch-invariant mode (0.32), called as its Qwen2, Qwen3 and Llama models call
them. All that Keel's trainer uses of vLLM stands here.

Each gives a token the same bits whatever else is in the batch: a GEMM adds up over K in one order,
attention goes over keys in blocks of one size, and norms do not choose their threads by the number
of rows. So a prompt and its completion in one piece get what an engine has computed token by token.
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
from keel.model.batch_invariant import BLOCK, VARIABLE
from keel.model.batch_invariant import kernel_variants as ways


class Unavailable(RuntimeError):
    """vLLM has no batch-invariant kernels here."""


def prepare() -> None:
    """Look for all kernels, so that what lacks shows before anything is computed.

    Raises Unavailable, with the cure.
    """
    if os.environ.get(VARIABLE) != "1":
        raise Unavailable(f"this process needs {VARIABLE}=1 in its environment from the start")
    try:
        found = _found()
    except (ImportError, AttributeError, KeyError) as error:
        raise Unavailable(
            f"model.batch_invariant: vLLM has no such kernels here ({error}); take its CUDA build "
            "of 0.32, or leave the knob out"
        ) from error
    if found.flash_version is None:
        raise Unavailable("model.batch_invariant: vLLM has no flash attention for this GPU")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, K] · weightᵀ [K, M] + bias [M] → [N, M]."""
    return ways.linear(_found().linear, x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · x / rms(x) over the last dimension of x [N, H, d], as where nothing was added to x
    just before."""
    return ways.norm_heads(_found().rms_norm, x, weight, eps)


def rms_norm_of_sum(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same for x [N, 1, d], a residual sum: the engine adds and norms in one kernel, which
    rounds the sum, so adding nothing to the rounded sum gives the same."""
    normed = torch.zeros_like(x, memory_format=torch.contiguous_format)
    # It writes the sum to where x is, and finds it there: `.data` has autograd not mind that.
    _found().fused_add_rms_norm(normed, x.contiguous().data, weight, eps)
    return normed


def rotate(positions: Tensor, x: Tensor, table: Tensor) -> None:
    """Rotary embedding of x [N, H, D], without gaps, in its place: positions [N], table [P, R] as
    `rotary_table`."""
    _found().rotary_embedding(positions, x.flatten(1), None, x.shape[-1], table, True)


def silu_and_mul(packed: Tensor) -> Tensor:
    """[N, 2·I] → silu of the first half · the second, [N, I]."""
    out = packed.new_empty(packed.shape[0], packed.shape[1] // 2)
    _found().silu_and_mul(out, packed)
    return out


def attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each segment.

    query [N, Hq, D]; key and value [N, Hkv, D] → [N, Hq, D], and the logarithms of the sums
    [Hq, N], float32. Keys and values are laid out in blocks as in the engine's cache: without,
    another kernel would run.
    """
    pages = _pages(segments.lengths, query.device)
    found = _found()
    return found.flash_attention(
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
        fa_version=found.flash_version,
        num_splits=1,
    )


@dataclass(frozen=True)
class Pages:
    """Where the tokens of packed segments lie in blocks of `BLOCK`, each segment in its own."""

    lengths: Tensor
    """[S] int32"""
    rows: Tensor
    """[N] of each token."""
    table: Tensor
    """[S, most] int32: the blocks of each segment, in order."""
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
        """[N, H, D] → [blocks, BLOCK, H, D]"""
        pages = x.new_zeros(self.blocks * BLOCK, *x.shape[1:])
        return pages.index_copy_(0, self.rows, x).unflatten(0, (-1, BLOCK))


_pages = lru_cache(maxsize=2)(Pages.of)
"""The same for all layers of a pass."""


def rotary_table(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[positions, R]: cosines and then sines, in `dtype`, computed on `device` as the engine's."""
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


class _Found:
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


_found = cache(_Found)
