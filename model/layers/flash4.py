"""Run FlashAttention-4 (package flash-attn-4) on packed rows, on Hopper and Blackwell GPUs.

For 16,000 tokens or more, both passes take about half as long as with PyTorch's flash attention 2.
Keys and values may have different widths. The package's autograd function cannot be traced into a
compiled layer, so its private forward and backward functions are wrapped as operators. Before a run
uses the kernels, `keel.model.attention.flash4_disagreement` compares them with plain attention.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

_GENERATIONS = (9, 10)
_PACKAGE, INSTALL = "flash_attn.cute", "flash-attn-4 (Keel's extra `gpu` has it)"


def missing(device: torch.device, folder: Path) -> str:
    """Return why FlashAttention-4 can't run on this device, or "" if it can. Compiled kernels are
    cached in `folder`, with a subfolder for each kind of GPU. By default, the package either
    doesn't cache kernels on disk or uses a folder in /tmp that any user could have created."""
    if device.type != "cuda":
        return "they need a GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in _GENERATIONS:
        return f"they need compute capability 9 or 10, this GPU has {major}.{minor}"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    cache_dir = folder / f"attention-{major}.{minor}"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_dir))
    try:
        if not find_spec(_PACKAGE.partition(".")[0]) or not find_spec(_PACKAGE):
            return f"{INSTALL} is not installed"
        _kernels()
    except Exception as error:  # compilers and drivers raise anything
        return f"{INSTALL} does not load: {type(error).__name__}: {error}"
    return ""


def supports_head_sizes(width: int, of_values: int, device: torch.device) -> bool:
    """Return True if there are half-precision kernels for these key and value head sizes."""
    if width % 8 or of_values % 8:
        return False
    if torch.cuda.get_device_capability(device)[0] == 9:
        return max(width, of_values) <= 256
    return max(width, of_values) <= 128 or (width, of_values) in ((192, 128), (256, 256))


def flash_attention4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
    key_offsets: Tensor,
    key_longest: int,
) -> Tensor:
    """Compute causal attention within segments, for head sizes that `supports_head_sizes` accepts:
    query [N, Hq, D], key [M, Hkv, D], value [M, Hkv, Dv] → [N, Hq, Dv]. `offsets` and `key_offsets`
    are [S+1] int32. The queries of a segment are aligned with its last keys. `window` is the number
    of tokens that each token can attend to, including itself."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    reach = -1 if window is None else window - 1
    ends = (offsets, key_offsets, longest, key_longest)
    return _attend(query, key, value, *ends, scale, reach)[0]


@torch.library.custom_op("keel::flash4", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    key_offsets: Tensor,
    longest: int,
    key_longest: int,
    scale: float,
    reach: int,
) -> tuple[Tensor, Tensor]:
    """Compute the outputs and the logsumexps [Hq, N] float32. `reach` is how many earlier tokens
    each token can attend to, or −1 for all."""
    out, lse = _empty_outputs(query, value)
    arguments = _arguments((offsets, key_offsets, longest, key_longest), scale, reach)
    _kernels()._flash_attn_fwd(query, key, value, **arguments, out=out, lse=lse, return_lse=True)
    return out, lse


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(query, value)


@torch.library.custom_op("keel::flash4_backward", mutates_args=())
def _backward(
    slope: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor,
    key_offsets: Tensor,
    longest: int,
    key_longest: int,
    scale: float,
    reach: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = {f"d{name}": _empty(x) for name, x in zip("qkv", (query, key, value), strict=True)}
    if len(key) != len(query):  # kernels may skip keys outside all windows
        grads["dk"].zero_()
        grads["dv"].zero_()
    arguments = _arguments((offsets, key_offsets, longest, key_longest), scale, reach)
    _kernels()._flash_attn_bwd(
        query, key, value, out, slope.contiguous(), lse, **arguments, **grads
    )
    return grads["dq"], grads["dk"], grads["dv"]


@_backward.register_fake
def _(
    slope: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(query), _empty(key), _empty(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, offsets, key_offsets, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, offsets, key_offsets)


def _slopes(ctx: Any, slope: Tensor, of_lse: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, *offsets = ctx.saved_tensors
    grads = _backward(slope, query, key, value, out, lse, *offsets, *ctx.rest)
    return *grads, None, None, None, None, None, None


_attend.register_autograd(_slopes, setup_context=_keep)


def _empty_outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    out = query.new_empty((tokens, heads, value.shape[-1]))
    return out, query.new_empty((heads, tokens), dtype=torch.float32)


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _arguments(ends: tuple[Tensor, Tensor, int, int], scale: float, reach: int) -> dict[str, Any]:
    window = {} if reach < 0 else {"window_size_left": reach, "window_size_right": 0}
    return {
        "cu_seqlens_q": ends[0],
        "cu_seqlens_k": ends[1],
        "max_seqlen_q": ends[2],
        "max_seqlen_k": ends[3],
        "softmax_scale": scale,
        "causal": not window,
        **window,
    }


@cache
def _kernels() -> Any:
    return import_module(f"{_PACKAGE}.interface")


class HeadWidths(NamedTuple):
    heads: int
    kv_heads: int
    width: int
    value_width: int
    window: int | None = None


def head_shapes(model: PreTrainedModel, ranks: int = 1) -> tuple[HeadWidths, ...]:
    """Return the model's distinct head shapes when its heads are split across `ranks`."""
    text: Any = model.config.get_text_config()
    heads = text.num_attention_heads // ranks
    if getattr(text, "kv_lora_rank", None) is not None:  # each head gets keys from the latent
        width = text.qk_nope_head_dim + text.qk_rope_head_dim
        return (HeadWidths(heads, heads, width, text.v_head_dim),)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    value_width = getattr(text, "v_head_dim", None) or width
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    kv_heads = lcm(kv_heads, ranks) // ranks
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ())
    slides = window is not None and (not kinds or "sliding_attention" in kinds)
    windows = [None] * (not slides or len(kinds) > 1) + [window] * slides
    return tuple(HeadWidths(heads, kv_heads, width, value_width, one) for one in windows)
