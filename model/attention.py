"""Attention over packed segments. Each token attends to its own segment and to the shared prefix
that the segment follows, if any.

The network receives a single row of N tokens, so embeddings, experts and routes need neither
padding nor another layout. Only the attention function knows where segments begin. It is registered
with transformers' attention interface, which passes it the keyword `segments` from the model's
forward. No N × N mask is built.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AttentionInterface, PreTrainedModel

from keel.model.torch_internals import to_device, varlen_operator
from keel.model.ulysses import heads_for_tokens, tokens_for_heads

NAME = "keel_packed"
"""Name of the attention function in transformers."""

_SPARSE_LAYERS = ("indexed_attention", "deepseek_sparse_attention")
"""Names of sparse attention layer types in transformers 5.19 and 5.17."""
_SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention", "attention", *_SPARSE_LAYERS})
_UNSUPPORTED = {"softcap": "a cap on attention scores", "s_aux": "learned attention sinks"}
"""Keywords for attention features of transformers that Keel does not support."""
LINEAR_FAMILIES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Model types whose layers of type `linear_attention` are supported."""
_FILL = 0.8
"""Minimum ratio between the shortest and the longest segment in a padded block."""

_VARLEN_TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True, slots=True)
class Contexts:
    """The contexts of S segments. A context consists of the shared prefix that the segment follows,
    if any, and the segment itself.

    A packed row contains a shared prefix only once (`keel.rl.prefix_sharing`), but
    attention needs contiguous keys and values, so the prefix is copied into each context. The
    backward pass sums the gradients in float32 and in a fixed order, so results are deterministic.
    """

    rows: Tensor
    """[M] packed token at each position in the concatenated contexts."""
    offsets: Tensor
    """[S+1] int32. Context s occupies the positions offsets[s] … offsets[s+1]−1."""
    longest: int
    lengths: tuple[int, ...]
    places: Tensor
    """[N] position of each packed token in its own segment's context."""
    shared: Tensor
    """[Q] packed tokens that also occur in other contexts."""
    others: Tensor
    """Positions of these shared tokens in other contexts, grouped by token."""
    counts: Tensor
    """[Q] number of other contexts that contain each shared token."""

    @staticmethod
    def build(
        lengths: Sequence[int], follows: Sequence[int], device: torch.device | str = "cpu"
    ) -> Contexts:
        """Build the contexts of segments. `follows` holds the index of the earlier segment that
        each segment continues, or −1 if there is none."""
        local, before = np.asarray(lengths), np.asarray(follows)
        started = np.where(before >= 0, local[before], 0)
        whole = started + local
        starts, offsets = (np.concatenate([[0], each.cumsum()]) for each in (local, whole))
        rows, places, shared, others, counts = [], [], [], [], []
        for s, first in enumerate(before):
            if first >= 0:
                rows.append(np.arange(starts[first], starts[first + 1]))
            rows.append(np.arange(starts[s], starts[s + 1]))
            places.append(np.arange(offsets[s] + started[s], offsets[s + 1]))
            if len(followers := np.flatnonzero(before == s)):
                shared.append(np.arange(starts[s], starts[s + 1]))
                others.append(np.add.outer(np.arange(local[s]), offsets[followers]).ravel())
                counts.append(np.full(local[s], len(followers)))
        none = np.zeros(0, np.int64)
        index = [np.concatenate(each or [none]) for each in (rows, places, shared, others, counts)]
        moved = [to_device(torch.from_numpy(each.astype(np.int64)), device) for each in index]
        return Contexts(
            moved[0],
            to_device(torch.from_numpy(offsets.astype(np.int32)), device),
            int(whole.max()),
            tuple(whole.tolist()),
            *moved[1:],
        )

    def expand(self, x: Tensor) -> Tensor:
        """Copy packed tokens [N, …] to their positions in the contexts, [M, …]."""
        return _spread(x, self.rows, self.places, self.shared, self.others, self.counts)


@torch.library.custom_op("keel::spread_contexts", mutates_args=())
def _spread(
    x: Tensor, rows: Tensor, places: Tensor, shared: Tensor, others: Tensor, counts: Tensor
) -> Tensor:
    return x.index_select(0, rows)


@_spread.register_fake
def _(x: Tensor, rows: Tensor, *rest: Tensor) -> Tensor:
    return x.new_empty((rows.shape[0], *x.shape[1:]))


@torch.library.custom_op("keel::gather_contexts", mutates_args=())
def _gather(
    slope: Tensor, places: Tensor, shared: Tensor, others: Tensor, counts: Tensor
) -> Tensor:
    """Sum the gradients [M, …] of all copies of each packed token. Returns [N, …]."""
    grads = slope.index_select(0, places)
    exact = torch.promote_types(slope.dtype, torch.float32)
    copies = slope.index_select(0, others).to(exact).flatten(1)
    added = torch.segment_reduce(copies, "sum", lengths=counts, unsafe=True)
    total = grads.index_select(0, shared).to(exact) + added.unflatten(1, slope.shape[1:])
    return grads.index_copy_(0, shared, total.to(slope.dtype))


@_gather.register_fake
def _(slope: Tensor, places: Tensor, *rest: Tensor) -> Tensor:
    return slope.new_empty((places.shape[0], *slope.shape[1:]))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[2:])


def _slope(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    return _gather(slope.contiguous(), *ctx.saved_tensors), None, None, None, None, None


_spread.register_autograd(_slope, setup_context=_keep)


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of a packed row, and how they are arranged in right-padded blocks."""

    offsets: Tensor
    """[S+1] int32. Segment s consists of the tokens offsets[s] … offsets[s+1]−1."""
    longest: int
    blocks: tuple[tuple[int, int], ...]
    """(number of segments, padded length) of each block. Together the blocks have M padded rows."""
    token_of_row: Tensor
    """[M] packed token in each padded row, or 0 if the row is padding."""
    row_of_token: Tensor
    """[N] padded row that holds each packed token."""
    lengths: tuple[int, ...]
    group: ProcessGroup | None = None
    """Process group that shares the row, if the row is split (`keel.model.ulysses`)."""
    contexts: Contexts | None = None
    """None if no segment follows another. Each segment then attends only to itself."""

    @staticmethod
    def of(
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        group: ProcessGroup | None = None,
        follows: Sequence[int] | None = None,
    ) -> Segments:
        """Build the segments of a packed row. See `keel.rl.packing.MicroBatch` for `follows`."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"packed segments: lengths must be at least 1, got {list(lengths)}")
        sizes = torch.as_tensor(lengths)
        offsets = torch.zeros(len(sizes) + 1, dtype=torch.int32)
        offsets[1:] = sizes.cumsum(0)
        order = sizes.argsort(descending=True, stable=True)
        blocks: list[tuple[int, int]] = []
        token_of_row, row_of_token, rows = [], torch.empty(int(offsets[-1]), dtype=torch.long), 0
        ranked, start = sizes[order], 0
        while start < len(order):  # runs of similar lengths, from the longest
            stop = int((ranked >= _FILL * ranked[start]).sum())
            members, start = order[start:stop], stop
            longest = int(sizes[members[0]])
            step = torch.arange(longest)
            real = step < sizes[members][:, None]
            tokens = (offsets[members][:, None] + step).where(real, 0).long()
            row_of_token[tokens[real]] = rows + real.flatten().nonzero()[:, 0]
            token_of_row.append(tokens.flatten())
            blocks.append((len(members), longest))
            rows += tokens.numel()
        return Segments(
            to_device(offsets, device),
            int(sizes.max()),
            tuple(blocks),
            to_device(torch.cat(token_of_row), device),
            to_device(row_of_token, device),
            tuple(lengths),
            group,
            None if follows is None else Contexts.build(lengths, follows, device),
        )


def use_packed_attention(model: PreTrainedModel) -> None:
    """Restrict attention in `model` to the segments passed to its forward pass as `segments`.
    Raises `ValueError` if the model has layers that would mix segments."""
    config = model.config.get_text_config()
    older = getattr(config, "layers_block_type", None)
    kinds = set(getattr(config, "layer_types", None) or older or ["full_attention"])
    hybrid = config.model_type in LINEAR_FAMILIES
    if hybrid:
        kinds.discard("linear_attention")
        _use_packed_linear_attention(model)
    if not kinds <= _SUPPORTED_LAYERS:
        raise ValueError(
            f"{config.model_type}: layers of type {sorted(kinds - _SUPPORTED_LAYERS)} would mix "
            "packed segments. Only full, sliding and sparse attention, and the linear attention of "
            f"{', '.join(LINEAR_FAMILIES)}, can be trained"
        )
    if not hybrid and not model.is_backend_compatible():  # the hybrid ones do not say so
        raise ValueError(
            f"{config.model_type}: attention does not use transformers' attention interface, so it "
            "would mix packed segments"
        )
    AttentionInterface.register(NAME, _packed_attention)
    model.set_attn_implementation(NAME)


def disable_compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Exclude a function from torch.compile, even when it is called from a compiled layer."""
    return torch.compiler.disable(function)  # type: ignore[return-value]


def attention_kept() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts for activation checkpointing (`context_fn`) that save attention outputs on
    GPUs instead of recomputing them. These outputs are no larger than those of other operations,
    but they take the longest to recompute, because the time grows quadratically with the length."""
    return create_selective_checkpoint_contexts([varlen_operator()])


class UnsupportedAttention(ValueError):
    """Raised if a model needs a form of attention that packed rows do not support."""


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each segment. This is the attention function registered with
    transformers.

    `query` is [1, Hq, N, D], and `key` and `value` are [1, Hkv, N, D]. Returns ([1, N, Hq, Dv],
    None). With sequence parallelism, N is the length of this rank's shard.
    """
    if segments is None:
        raise UnsupportedAttention(
            f"attention {NAME!r} needs the keyword `segments` in the model's forward"
        )
    if attention_mask is not None:
        raise UnsupportedAttention(
            f"{type(module).__name__} uses an attention mask, which packed rows do not support"
        )
    unsupported = [name for name in _UNSUPPORTED if unused.get(name) is not None]
    causal = getattr(module, "is_causal", True)
    if unsupported or dropout or not causal:
        # Built only in this branch, because a compiled layer cannot trace text.
        parts = [f"{_UNSUPPORTED[name]} ({name})" for name in unsupported]
        parts += ["dropout"] * (dropout > 0) + ["attention to later tokens"] * (not causal)
        raise UnsupportedAttention(
            f"{type(module).__name__} has {' and '.join(parts)}, which packed rows do not support"
        )
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, H, D]
    operator = attend if segments.group is None else _sequence_parallel
    return operator(query, key, value, segments, scaling, sliding_window)[None], None


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *rest: Any) -> Tensor:
    """Compute attention for a whole row. `query` is [N, Hq, D], and `key` and `value` are [N, Hkv,
    D]. `rest` holds the scaling (None for the default) and the window (None if unlimited). Returns
    [N, Hq, Dv]."""
    operator = _varlen_attention if _has_flash(query, value) else _padded
    return operator(query, key, value, segments, *rest)


def _has_flash(query: Tensor, value: Tensor) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and half and query.shape[-1] == value.shape[-1]


def _varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Compute attention with PyTorch's variable-length kernel. This function is compiled as part of
    its layer, so its code must work for any row."""
    # Older versions infer grouped heads.
    grouped = query.shape[1] != key.shape[1]
    options: dict[str, Any] = {"enable_gqa": grouped} if _VARLEN_TAKES_GQA else {}
    offsets, longest = segments.offsets, segments.longest
    if (contexts := segments.contexts) is not None:
        # A segment's queries are at the end of its context, as flash attention assumes.
        key, value = contexts.expand(key), contexts.expand(value)
        offsets, longest = contexts.offsets, contexts.longest
    # A window of w tokens includes the token itself.
    reach = (-1 if window is None else window - 1, 0)
    ends = segments.offsets, offsets, segments.longest, longest
    output = varlen_attn(query, key, value, *ends, scale=scaling, window_size=reach, **options)
    assert isinstance(output, Tensor)  # without statistics
    return output


@disable_compile  # blocks differ between rows
def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    if (contexts := segments.contexts) is not None:
        query, key, value = (contexts.expand(x) for x in (query, key, value))
        whole = _make_segments(contexts.lengths, query.device)
        return _padded(query, key, value, whole, scaling, window).index_select(0, contexts.places)

    def block(*tensors: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in tensors)
        longest, mask = q.shape[2], None
        if window is not None and longest > window:
            step = torch.arange(longest, device=q.device)
            back = step[:, None] - step
            mask = (back >= 0) & (back < window)
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
        return out.transpose(1, 2)

    return _apply_in_blocks(block, segments, query, key, value)


def _apply_in_blocks(
    function: Callable[..., Tensor], segments: Segments, *tokens: Tensor
) -> Tensor:
    """Apply a causal function of [B, L, …] tensors to each padded block of a row [N, …]. The
    padding is on the right, where no token attends to it."""
    padded = [x.index_select(0, segments.token_of_row) for x in tokens]
    outputs, start = [], 0
    for count, longest in segments.blocks:
        stop = start + count * longest
        block = [x[start:stop].unflatten(0, (count, longest)) for x in padded]
        outputs.append(function(*block).flatten(0, 1))
        start = stop
    return torch.cat(outputs).index_select(0, segments.row_of_token)


@lru_cache(maxsize=2)
def _make_segments(lengths: tuple[int, ...], device: torch.device) -> Segments:
    """Build a row's segments. The result is cached for all layers of a micro-batch and works both
    with and without gradients."""
    with torch.inference_mode(False):
        return Segments.of(lengths, device)


@disable_compile  # collectives
def _sequence_parallel(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *rest: Any
) -> Tensor:
    assert segments.group is not None
    query, key, value = heads_for_tokens(query, key, value, segments.group)
    return tokens_for_heads(attend(query, key, value, segments, *rest), segments.group)


def _use_packed_linear_attention(model: PreTrainedModel) -> None:
    """Restrict the gated delta rule layers in `model` to the `segments` that its forward pass
    receives.

    Two functions in such a layer mix tokens: a causal convolution and the delta rule itself.
    transformers calls both by name, so this replaces them. On GPUs, flash-linear-attention's
    kernels take the segment offsets directly. Without that package, and on CPUs, segments are
    right-padded and run as batches with transformers' own functions. Neither function lets a token
    see later ones, so the padding has no effect.
    """
    module = sys.modules[type(model).__module__]
    for name, patch in (
        ("causal_conv1d_fn", _convolution),
        ("torch_chunk_gated_delta_rule", _delta_rule),
    ):
        original = getattr(module, name)
        if not hasattr(original, "keel_patch"):
            patched: Any = torch.compiler.disable(wraps(original)(patch(original)))
            patched.keel_patch = True
            setattr(module, name, patched)


def _convolution(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def packed(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        segments: Segments | None = None,
        **options: Any,
    ) -> Tensor:
        if segments is None:
            return original(hidden_states, weight, bias, activation=activation, **options)
        _check_linear(segments)
        tokens = hidden_states.transpose(1, 2)  # [1, N, C]
        if tokens.is_cuda and (kernels := _fla_kernels()):
            convolve, _ = kernels
            ends = segments.offsets
            out, _ = convolve(tokens, weight, bias, activation=activation, cu_seqlens=ends)
            return out.transpose(1, 2)

        def plain(block: Tensor) -> Tensor:
            convolve = _for(block, original)
            out = convolve(block.transpose(1, 2), weight, bias, activation=activation)
            return out.transpose(1, 2)

        return _apply_in_blocks(plain, segments, tokens[0])[None].transpose(1, 2)

    return packed


def _delta_rule(original: Callable[..., Any]) -> Callable[..., Any]:
    def packed(*qkv: Tensor, segments: Segments | None = None, **options: Any) -> Any:
        if segments is None:
            return original(*qkv, **options)
        _check_linear(segments)
        g, beta = options["g"], options["beta"]
        scaled = {"use_qk_l2norm_in_kernel": options["use_qk_l2norm_in_kernel"]}
        if g.is_cuda and (kernels := _fla_kernels()):
            _, rule = kernels
            return rule(*qkv, g=g, beta=beta, cu_seqlens=segments.offsets, **scaled)

        def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            return _for(q, original)(q, k, v, g=g, beta=beta, **scaled)[0]

        return _apply_in_blocks(plain, segments, *(x[0] for x in (*qkv, g, beta)))[None], None

    return packed


def _for(tokens: Tensor, function: Callable[..., Any]) -> Callable[..., Any]:
    # On a CPU, transformers' wrapper would call kernels that run on GPUs only.
    return function if tokens.is_cuda else inspect.unwrap(function)


def _check_linear(segments: Segments) -> None:
    if segments.contexts is not None or segments.group is not None:
        raise ValueError("linear attention supports no shared prompts and no sequence parallelism")


@cache
def _fla_kernels() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    try:
        convolution = import_module("fla.modules.convolution").causal_conv1d
        return convolution, import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except ImportError:
        return None
