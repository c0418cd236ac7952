"""Attention over packed segments: a token attends to the earlier tokens of its own segment only,
and to the segment that its own one follows.

The network sees one row of N tokens, so embeddings, experts and routes need no padding and no
second layout. Only the attention operator knows where segments end. It is registered with
transformers' attention interface, which hands it the keyword `segments` of the model's forward;
no mask of N × N entries is ever built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AttentionInterface, PreTrainedModel

from keel.model.device import to_device
from keel.model.layers.contexts import Contexts
from keel.model.layers.flash4 import attend4, operator4
from keel.model.torch_internals import varlen_operator
from keel.model.ulysses import heads_for_tokens, tokens_for_heads

NAME, NAME4 = "keel_packed", "keel_packed_4"
"""Names of this attention in transformers' registry: with PyTorch's kernels, and with
FlashAttention-4's (`keel.model.layers.flash4`). Without "flash", by which transformers would take
them for its own."""

SPARSE_LAYERS = ("indexed_attention", "deepseek_sparse_attention")
"""transformers 5.19's and 5.17's name of what `keel.model.sparse` computes."""
SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention", "attention", *SPARSE_LAYERS})
UNKNOWN = {"softcap": "a cap on attention scores", "s_aux": "learned attention sinks"}
"""Keyword with which transformers asks an attention function for more than softmax attention →
what it asks for."""
FILL = 0.8
"""A padded block holds segments of at least this share of its longest one."""

_VARLEN_TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the segments of a packed row lie, and the same tokens as right-padded blocks."""

    offsets: Tensor
    """[S+1] int32: segment s is tokens offsets[s] … offsets[s+1]−1."""
    longest: int
    blocks: tuple[tuple[int, int], ...]
    """(segments, tokens each) of the padded blocks, one after the other in M padded rows."""
    token_of_row: Tensor
    """[M] packed token in each padded row; 0 where the row is padding."""
    row_of_token: Tensor
    """[N] padded row of each packed token."""
    lengths: tuple[int, ...]
    """[S]"""
    group: ProcessGroup | None = None
    """Ranks that each hold an equal part of the row's tokens (`keel.model.ulysses`)."""
    contexts: Contexts | None = None
    """What the segments attend to, where some follow others; None: each to itself alone."""

    @staticmethod
    def of(
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        group: ProcessGroup | None = None,
        follows: Sequence[int] | None = None,
    ) -> Segments:
        """Segments of these lengths, laid end to end. Similar lengths share a padded block.
        follows: as in `keel.rl.packing.MicroBatch`."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"packed segments: lengths must be at least 1, got {list(lengths)}")
        sizes = torch.as_tensor(lengths)
        offsets = torch.zeros(len(sizes) + 1, dtype=torch.int32)
        offsets[1:] = sizes.cumsum(0)
        order = sizes.argsort(descending=True, stable=True)
        blocks: list[tuple[int, int]] = []
        token_of_row, row_of_token, rows = [], torch.empty(int(offsets[-1]), dtype=torch.long), 0
        for members in _similar(order, sizes):
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
            None if follows is None else Contexts.of(lengths, follows, device),
        )


def use_packed_attention(model: PreTrainedModel, *, flash4: bool = False) -> None:
    """Make `model` attend inside `segments` (a keyword of its forward) only. flash4: by
    FlashAttention-4's kernels, which must be there (`keel.model.layers.flash4.missing`), for all of
    its heads (`keel.model.layers.flash4.disagreement`).

    Raises `ValueError` for a model whose layers would silently mix segments or ignore this.
    """
    config = model.config.get_text_config()
    older = getattr(config, "layers_block_type", None)
    kinds = set(getattr(config, "layer_types", None) or older or ["full_attention"])
    if not kinds <= SUPPORTED_LAYERS:
        raise ValueError(
            f"model of type {config.model_type}: layers of kind {sorted(kinds - SUPPORTED_LAYERS)} "
            "carry state from one packed segment into the next; only full and sliding attention "
            "can be trained"
        )
    if not model.is_backend_compatible():
        raise ValueError(
            f"model of type {config.model_type}: its attention does not go through transformers' "
            "attention interface, so packed segments would see each other"
        )
    AttentionInterface.register(NAME, packed_attention)
    AttentionInterface.register(NAME4, packed_attention4)
    model.set_attn_implementation(NAME4 if flash4 else NAME)


def uncompiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Called from a compiled layer, not a part of its graph."""
    return torch.compiler.disable(function)  # type: ignore[return-value]


def attention_kept() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """`context_fn` of activation checkpointing that keeps what attention on GPUs gave, so that it
    is not computed again: other than the rest of a layer it takes the square of a context's length,
    and no more memory."""
    return create_selective_checkpoint_contexts([varlen_operator(), operator4()])


class UnsupportedAttention(ValueError):
    """What a model asks of its attention and packed rows cannot give."""


def packed_attention(
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
    kernels: Callable[..., Tensor] | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """transformers attention function: causal inside each segment.

    query [1, Hq, N, D]; key and value [1, Hkv, N, D]. Returns ([1, N, Hq, Dv], None). Where the row
    is cut over ranks, N is this rank's part of it. kernels: `attend` by default.
    """
    if segments is None:
        raise UnsupportedAttention(
            f"attention {NAME!r} needs the keyword `segments` in the model's forward"
        )
    if attention_mask is not None:
        raise UnsupportedAttention(
            f"attention {NAME!r} of {type(module).__name__}: attention by a mask that the model "
            "computes is not supported"
        )
    unknown = [name for name in UNKNOWN if unused.get(name) is not None]
    causal = getattr(module, "is_causal", True)
    if unknown or dropout or not causal:
        # Texts are built here alone: a compiled layer cannot trace them.
        parts = [f"{UNKNOWN[name]} ({name})" for name in unknown]
        parts += [f"dropout of {dropout}"] * (dropout > 0)
        parts += ["attention to later tokens"] * (not causal)
        raise UnsupportedAttention(
            f"{type(module).__name__} has {' and '.join(parts)}, which attention over packed "
            "segments does not compute here"
        )
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, H, D]
    kernels = kernels or attend
    operator = kernels if segments.group is None else _spread(kernels)
    return operator(query, key, value, segments, scaling, sliding_window)[None], None


def packed_attention4(*args: Any, **options: Any) -> tuple[Tensor, None]:
    """`packed_attention` by FlashAttention-4."""
    return packed_attention(*args, **options, kernels=_attend4)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attention of a whole row: query [N, Hq, D]; key and value [N, Hkv, D] → [N, Hq, Dv]."""
    operator = _varlen if _has_flash(query, value) else _padded
    return operator(query, key, value, segments, scaling, window)


def _attend4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """The same by FlashAttention-4."""
    key, value, offsets, longest = _keys(key, value, segments)
    own = segments.offsets, segments.longest
    return attend4(query, key, value, *own, scaling, window, offsets, longest)


def _keys(key: Tensor, value: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor, int]:
    """What each segment attends to, side by side: keys, values, offsets, tokens of the longest. A
    segment's queries are the last of them, as flash attention takes it of fewer queries."""
    if (contexts := segments.contexts) is None:
        return key, value, segments.offsets, segments.longest
    return contexts.spread(key), contexts.spread(value), contexts.offsets, contexts.longest


def _has_flash(query: Tensor, value: Tensor) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and half and query.shape[-1] == value.shape[-1]


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Flash attention over offsets. Part of a compiled layer's graph: nothing here looks at
    numbers that differ from row to row."""
    # Older ones take fewer heads of keys and values without being told.
    grouped = query.shape[1] != key.shape[1]
    options: dict[str, Any] = {"enable_gqa": grouped} if _VARLEN_TAKES_GQA else {}
    key, value, offsets, longest = _keys(key, value, segments)
    # A window of w tokens, the token itself included, reaches w − 1 back.
    reach = (-1 if window is None else window - 1, 0)
    output = varlen_attn(
        query,
        key,
        value,
        segments.offsets,
        offsets,
        segments.longest,
        longest,
        scale=scaling,
        window_size=reach,
        **options,
    )
    assert isinstance(output, Tensor)  # and not with statistics
    return output


@uncompiled  # blocks differ from row to row
def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Plain attention over right-padded blocks: padding is later than every real token of its
    segment, so under the causal mask no real token sees it."""
    if (contexts := segments.contexts) is not None:
        query, key, value = (contexts.spread(x) for x in (query, key, value))
        whole = _laid_out(contexts.lengths, query.device)
        return _padded(query, key, value, whole, scaling, window).index_select(0, contexts.places)
    rows = segments.token_of_row
    padded = [x.index_select(0, rows) for x in (query, key, value)]
    outputs, start = [], 0
    for count, longest in segments.blocks:
        stop = start + count * longest
        q, k, v = (x[start:stop].unflatten(0, (count, longest)).transpose(1, 2) for x in padded)
        mask = None
        if window is not None and longest > window:
            step = torch.arange(longest, device=q.device)
            back = step[:, None] - step
            mask = (back >= 0) & (back < window)
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        start = stop
    return torch.cat(outputs).index_select(0, segments.row_of_token)


@lru_cache(maxsize=2)
def _laid_out(lengths: tuple[int, ...], device: torch.device) -> Segments:
    """Whole contexts, for all layers of a micro-batch, in whatever mode it is asked for."""
    with torch.inference_mode(False):
        return Segments.of(lengths, device)


def _spread(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`operator` on all tokens and this rank's heads, for a row that is cut over ranks."""

    @uncompiled  # ranks exchange what they have
    def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *rest: Any) -> Tensor:
        assert segments.group is not None
        query, key, value = heads_for_tokens(query, key, value, segments.group)
        return tokens_for_heads(operator(query, key, value, segments, *rest), segments.group)

    return attend


def _similar(order: Tensor, sizes: Tensor) -> list[Tensor]:
    """Runs of `order` (longest first) whose sizes differ by less than `FILL` allows."""
    ranked = sizes[order]
    runs, start = [], 0
    while start < len(order):
        stop = int((ranked >= FILL * ranked[start]).sum())
        runs.append(order[start:stop])
        start = stop
    return runs
