"""Gated delta rule layers over packed segments.

Two functions of such a layer mix tokens: a causal convolution and the delta rule itself.
transformers calls both by name and passes them the keyword `segments` from the model's forward, so
replacing these two functions restricts every layer to its segments.

On GPUs, flash-linear-attention's kernels take the offsets of the segments. Without that package,
and on CPUs, segments are padded on the right and run as batches with transformers' own functions.
Neither function lets a token see later ones, so the padding changes nothing.

`segments` is a `keel.model.attention.Segments`, which imports this module.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

FAMILIES = ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Model types whose layers of type `linear_attention` are supported."""
_CONVOLUTION, _DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
"""Names of the two functions in transformers' modules."""
_MODULES = ("modules.convolution", "ops.gated_delta_rule")


def use_packed_linear_attention(model: PreTrainedModel) -> None:
    """Restrict the gated delta rule layers in `model` to the `segments` passed to its forward.
    Raises ValueError if this version of transformers lacks the functions to replace."""
    module = sys.modules[type(model).__module__]
    for name, patch in ((_CONVOLUTION, _convolution), (_DELTA_RULE, _delta_rule)):
        original = getattr(module, name, None)
        if original is None:
            raise ValueError(
                f"{model.config.model_type}: this version of transformers has no {name}, so linear "
                "attention would mix packed segments. Install the version in pyproject.toml"
            )
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
        segments: Any = None,
        **options: Any,
    ) -> Tensor:
        if segments is None:
            return original(hidden_states, weight, bias, activation=activation, **options)
        _check(segments)
        tokens = hidden_states.transpose(1, 2)  # [1, N, C]
        if tokens.is_cuda and (kernels := _kernels()):
            convolve, _ = kernels
            ends = segments.offsets
            out, _ = convolve(tokens, weight, bias, activation=activation, cu_seqlens=ends)
            return out.transpose(1, 2)

        def plain(block: Tensor) -> Tensor:
            convolve = _for(block, original)
            out = convolve(block.transpose(1, 2), weight, bias, activation=activation)
            return out.transpose(1, 2)

        return _in_blocks(plain, segments, tokens).transpose(1, 2)

    return packed


def _delta_rule(original: Callable[..., Any]) -> Callable[..., Any]:
    def packed(*qkv: Tensor, segments: Any = None, **options: Any) -> Any:
        if segments is None:
            return original(*qkv, **options)
        _check(segments)
        g, beta = options["g"], options["beta"]
        scaled = {"use_qk_l2norm_in_kernel": options["use_qk_l2norm_in_kernel"]}
        if g.is_cuda and (kernels := _kernels()):
            _, rule = kernels
            return rule(*qkv, g=g, beta=beta, cu_seqlens=segments.offsets, **scaled)

        def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            return _for(q, original)(q, k, v, g=g, beta=beta, **scaled)[0]

        return _in_blocks(plain, segments, *qkv, g, beta), None

    return packed


def _for(tokens: Tensor, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` for tokens on a GPU. On a CPU, return the version without GPU-only
    kernels."""
    return function if tokens.is_cuda else inspect.unwrap(function)


def _in_blocks(function: Callable[..., Tensor], segments: Any, *tokens: Tensor) -> Tensor:
    """Apply a causal function of [B, L, …] tensors to each padded block of a row [1, N, …]."""
    padded = [x[0].index_select(0, segments.token_of_row) for x in tokens]
    outputs, start = [], 0
    for count, longest in segments.blocks:
        stop = start + count * longest
        block = [x[start:stop].unflatten(0, (count, longest)) for x in padded]
        outputs.append(function(*block).flatten(0, 1))
        start = stop
    return torch.cat(outputs).index_select(0, segments.row_of_token)[None]


def _check(segments: Any) -> None:
    if segments.contexts is not None or segments.group is not None:
        raise ValueError("linear attention supports no shared prompts and no sequence parallelism")


@cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return flash-linear-attention's convolution and delta rule, or None if the package is
    missing."""
    try:
        modules, ops = (import_module(f"fla.{name}") for name in _MODULES)
    except ImportError:
        return None
    return modules.causal_conv1d, ops.chunk_gated_delta_rule
