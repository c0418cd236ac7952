"""Kernels of vLLM's batch-invariant mode (0.32), called in the same way as in vLLM's Qwen2, Qwen3,
Qwen3-MoE and Llama models.

This is the only place where the trainer uses vLLM. Each kernel returns the same bits for a token in
any batch: GEMMs sum over K in a fixed order, attention processes keys in blocks of a fixed size,
and norms do not choose their threads by the number of rows. A forward pass over a whole sequence
therefore returns the same bits as an engine that decodes it token by token.

`linear_like` and `norm_heads_like` try faster variants that return exactly the same bits, and
compare each one with vLLM's kernel before using it. Engines and the trainer run the same code
(`keel.rollout.engine.patches`). They may pick different variants, because all are bit-identical.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig

from keel.model.batch_invariant import BLOCK, VARIABLE

if TYPE_CHECKING:  # engines import this file, too
    from keel.model.attention import Segments


_Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_Norm = Callable[[Tensor, Tensor, float], Tensor]

_HOPPER = 9
"""Major compute capability of the GPUs on which the GEMMs were tested."""
_FEW = 512
"""Maximum number of rows for which narrow tiles are tried. Decoding steps have few rows."""
_MOST = 8192
"""Maximum number of rows in a trial. The outputs of a whole micro-batch would take gigabytes."""
_FULL = 128 * 128 * 132
"""A GEMM with at least this many outputs has enough tiles to fill the GPU, so cuBLAS does not split
K on its own. Explicitly forbidding the split would cost about 400 µs per call on the host,
apparently for an algorithm search."""
_TRIALS, _CALLS = 3, 8
"""Number of timed runs of each bit-identical variant, and number of calls in each run."""

_TILES = (
    (256, (128, 256, 64, 16, 8, 3)),
    (32, (64, 128, 64, 8, 4, 4)),
    (0, (16, 128, 64, 1, 4, 4)),
)
"""Tiles of expert GEMMs by the mean number of rows per expert, which is at least the first number:
rows, columns and depth of a tile, tiles per group, warps and stages."""

_CHOICES: dict[Any, Any] = {}
"""Function chosen for each operation and shape, with the number of rows rounded up to a power of
two."""


def prepare() -> None:
    """Load all batch-invariant kernels. Raises RuntimeError if one is missing."""
    if os.environ.get(VARIABLE) != "1":
        raise RuntimeError(f"set {VARIABLE}=1 in the environment before this process starts")
    try:
        kernels = _kernels()
    except (ImportError, AttributeError, KeyError) as error:
        raise RuntimeError(
            f"model.batch_invariant: vLLM has no batch-invariant kernels here ({error}). Install "
            "its CUDA build of 0.32, or remove the knob"
        ) from error
    if kernels.flash_version is None:
        raise RuntimeError("model.batch_invariant: vLLM has no flash attention for this GPU")
    use_larger_expert_tiles()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x [N, K] · weightᵀ [K, M] + bias [M] → [N, M]."""
    return linear_like(_kernels().linear, x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute weight · x / rms(x) over the last dimension of x [N, H, d]."""
    return norm_heads_like(_kernels().rms_norm, x, weight, eps)


def rms_norm_of_sum(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMS norm to a rounded residual sum x [N, 1, d]. The engine adds and normalizes in a
    single kernel that rounds the sum first, so adding 0 to the rounded sum gives the same
    result."""
    normed = torch.zeros_like(x, memory_format=torch.contiguous_format)
    # The kernel writes the sum to x in place; `.data` hides that from autograd.
    _kernels().fused_add_rms_norm(normed, x.contiguous().data, weight, eps)
    return normed


def rotate(positions: Tensor, x: Tensor, table: Tensor) -> None:
    """Apply rotary embeddings in place to x [N, H, D], which must be contiguous. `positions` is
    [N], and `table` [P, R] contains cosines and sines."""
    _kernels().rotary_embedding(positions, x.flatten(1), None, x.shape[-1], table, True)


def silu_and_mul(packed: Tensor) -> Tensor:
    """Compute silu(first half) · second half of the packed input, [N, 2·I] → [N, I]."""
    out = packed.new_empty(packed.shape[0], packed.shape[1] // 2)
    _kernels().silu_and_mul(out, packed)
    return out


def route(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Choose experts from router logits [N, E]. Returns their weights [N, K] float32, which sum to
    1 if `normalize` is set, and their indices [N, K] int32."""
    weights = logits.new_empty(len(logits), top_k, dtype=torch.float32)
    experts, scratch = (torch.empty_like(weights, dtype=torch.int32) for _ in range(2))
    _kernels().topk_softmax(weights, experts, scratch, logits, normalize)
    return weights, experts


def run_experts(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Compute Σ_k weights · down[e] · (silu(gate) · up) for the chosen experts e, where [gate, up]
    = gate_up[e] · x. Shapes: x [N, d], experts and weights [N, K], gate_up [E, 2·I, d], down
    [E, d, I]. Returns [N, d]."""
    return _kernels().fused_experts(x, gate_up, down, weights, experts.int())


def attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within each segment: query [N, Hq, D], key and value [N, Hkv, D] →
    outputs [N, Hq, D] and logsumexps [Hq, N] float32. Keys and values are copied into blocks laid
    out like the engine's cache, so that the same kernel is selected."""
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
class _Pages:
    """Packed segments laid out in blocks of `BLOCK` tokens. No two segments share a block."""

    lengths: Tensor
    rows: Tensor
    """[N] row within the blocks that holds each token."""
    table: Tensor
    """[S, max] int32, blocks of each segment in order."""
    blocks: int

    @staticmethod
    def of(lengths: tuple[int, ...], device: torch.device) -> _Pages:
        sizes = torch.tensor(lengths)
        blocks = -(-sizes // BLOCK)
        first = blocks.cumsum(0) - blocks
        starts = sizes.cumsum(0) - sizes
        shift = first * BLOCK - starts
        rows = torch.arange(int(sizes.sum())) + torch.repeat_interleave(shift, sizes)
        count = int(blocks.sum())
        table = (first[:, None] + torch.arange(int(blocks.max()))).clamp(max=count - 1)
        return _Pages(
            sizes.to(device, torch.int32), rows.to(device), table.to(device, torch.int32), count
        )

    def lay_out(self, x: Tensor) -> Tensor:
        """Copy tokens into the blocks, [N, H, D] → [blocks, BLOCK, H, D]."""
        pages = x.new_zeros(self.blocks * BLOCK, *x.shape[1:])
        return pages.index_copy_(0, self.rows, x).unflatten(0, (-1, BLOCK))


_pages = lru_cache(maxsize=2)(_Pages.of)


def rotary_table(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the engine's rotary table, [positions, R], with the cosines followed by the sines."""
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


def use_larger_expert_tiles() -> None:
    """Make vLLM's batch-invariant expert GEMMs choose their tiles by the number of rows on Hopper.
    All of them sum over the depth in the same order, so the bits stay the same
    (tests/gpu/test_invariant_kernels.py). vLLM's own tiles are small."""
    from vllm.model_executor.layers.fused_moe import fused_moe  # noqa: PLC0415

    original = fused_moe.get_default_config
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == _HOPPER
    if not hopper or hasattr(original, "keel_patch"):
        return

    def get_default_config(M: int, E: int, N: int, K: int, topk: int, *kind: Any) -> dict[str, int]:
        if any(value is not None for value in kind):  # quantized, or float32
            return original(M, E, N, K, topk, *kind)
        return next(_tiles(*sizes) for least, sizes in _TILES if M * topk >= least * E)

    get_default_config.keel_patch = original  # type: ignore[attr-defined]
    fused_moe.get_default_config = get_default_config


def _tiles(rows: int, columns: int, depth: int, group: int, warps: int, stages: int) -> Any:
    sizes = {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": columns, "BLOCK_SIZE_K": depth}
    return sizes | {"GROUP_SIZE_M": group, "SPLIT_K": 1, "num_warps": warps, "num_stages": stages}


class _Kernels:
    def __init__(self) -> None:
        import vllm._custom_ops as operators  # noqa: PLC0415
        from vllm.model_executor.determinism import batch_invariant as own  # noqa: PLC0415
        from vllm.model_executor.determinism import batch_invariant_configs  # noqa: PLC0415
        from vllm.model_executor.layers.fused_moe import fused_moe  # noqa: PLC0415
        from vllm.v1.attention.backends import fa_utils  # noqa: PLC0415

        batch_invariant_configs.resolve_tuned_matmul_configs()
        self.linear: Any = own.linear_batch_invariant
        self.rms_norm: Any = own.rms_norm_batch_invariant
        self.fused_add_rms_norm: Any = operators.fused_add_rms_norm
        self.rotary_embedding: Any = operators.rotary_embedding
        self.silu_and_mul: Any = torch.ops._C.silu_and_mul
        self.topk_softmax: Any = operators.topk_softmax
        self.fused_experts: Any = fused_moe.fused_experts
        self.flash_attention: Any = vars(fa_utils)["flash_attn_varlen_func"]
        self.flash_version: int | None = fa_utils.get_flash_attn_version()


_kernels = cache(_Kernels)


def linear_like(local: _Linear, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x [N, K] · weightᵀ [K, M] + bias [M] → [N, M] with the fastest kernel that is
    bit-identical to vLLM's kernel `local`. On Hopper, cuBLAS is faster and sums in the same order
    unless it splits K, which it does if there are few rows and the matrix is narrow and deep. In
    that case, a kernel with narrow tiles is faster."""
    kind = (x.device, x.dtype, weight.shape, bias is None, _log2_ceil(len(x)))
    chosen: _Linear | None = _CHOICES.get(kind)
    if chosen is None:
        if not len(x) or torch.cuda.is_current_stream_capturing():  # no comparison is possible
            return local(x, weight, bias)
        chosen = _CHOICES[kind] = _choose_linear(local, x, weight, bias)
    return chosen(x, weight, bias)


def norm_heads_like(local: _Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute weight [D] · x / rms(x) over the last dimension of x [N, H, D], bit-identically to
    vLLM's kernel `local`. Avoids the contiguous copy of x that `local` needs whenever possible."""
    kind = (x.device, x.dtype, x.shape[1:], eps)
    chosen: _Norm | None = _CHOICES.get(kind)
    if chosen is None:
        if not len(x) or torch.cuda.is_current_stream_capturing():
            return local(x, weight, eps)
        from keel.model.layers import kernels  # noqa: PLC0415  (Triton)

        trial = _random(x[:_FEW])  # tokens are independent
        same = torch.equal(local(trial, weight, eps), kernels.norm_heads(trial, weight, eps))
        chosen = _CHOICES[kind] = kernels.norm_heads if same else local
    return chosen(x, weight, eps)


def _choose_linear(local: _Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> _Linear:
    half = x.dtype in (torch.bfloat16, torch.float16)
    if not half or torch.cuda.get_device_capability(x.device)[0] != _HOPPER:
        return local
    few, fewest = len(x) <= _FEW, (1 << _log2_ceil(len(x))) // 2 + 1
    # Random inputs: an engine's first calls have identical rows, or zeros after attention.
    trial, bias = _random(x[:_MOST]), None if bias is None else _random(bias)
    expected = local(trial, weight, bias)

    def same(variant: _Linear) -> bool:
        return torch.equal(expected, variant(trial, weight, bias)) and torch.equal(
            expected[:fewest], variant(trial[:fewest], weight, bias)
        )

    if fewest * len(weight) >= _FULL and same(_default):
        return _default
    variants = [_without_split_k]
    if few:
        from keel.model.layers import kernels  # noqa: PLC0415  (Triton)

        variants.append(kernels.few_rows)
    variants = [variant for variant in variants if same(variant)]
    if len(variants) < 2:
        return variants[0] if variants else local
    return min(variants, key=lambda variant: _seconds(lambda: variant(trial, weight, bias)))


def _seconds(call: Callable[[], object]) -> float:
    graph, stream = torch.cuda.CUDAGraph(), _trial_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    best = float("inf")
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_CALLS):
            call()
        graph.capture_end()
        for _ in range(_TRIALS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1000)
    torch.cuda.current_stream().wait_stream(stream)
    return best


@cache
def _trial_stream(device: int) -> torch.cuda.Stream:
    """Return the CUDA stream on which all candidate kernels are timed. They share one because
    cuBLAS reserves 32 MiB per stream on Hopper."""
    return torch.cuda.Stream(device)


def _log2_ceil(rows: int) -> int:
    return max(0, rows - 1).bit_length()


def _random(x: Tensor) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(0)
    return torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)


def _without_split_k(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with _cublaslt(x.dtype, splits=False):
        return functional.linear(x, weight, bias)


def _default(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with _cublaslt(x.dtype, splits=True):
        return functional.linear(x, weight, bias)


@contextmanager
def _cublaslt(dtype: torch.dtype, *, splits: bool) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    knob = f"allow_{'bf16' if dtype == torch.bfloat16 else 'fp16'}_reduced_precision_reduction"
    before = getattr(matmul, knob), getattr(matmul, f"{knob}_split_k")
    library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    setattr(matmul, knob, (splits, splits))  # for sums and for splitting K
    try:
        yield
    finally:
        setattr(matmul, knob, before)
        torch.backends.cuda.preferred_blas_library(library)
