"""Run PyTorch's flash attention with the kernels of FlashAttention-4 (package flash-attn-4), on
Hopper and Blackwell GPUs.

For 16,000 tokens or more, both passes take about half as long as with PyTorch's own kernels.
PyTorch imports this module for `_flash_attn_fwd` and `_flash_attn_bwd`, which adapt the package's
functions of these names to PyTorch's calls.
"""

import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from math import lcm
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.model.attention import Segments, attend
from keel.model.torch_internals import replace_flash_kernels

PACKAGE = "flash-attn-4 (Keel's extra `gpu` has it)"
_GENERATIONS = (9, 10)
_ACTIVE: list[Any] = []
"""The handle of the kernels, if PyTorch uses them."""
_PROBE = (1, 130, 64, 7, 300, 65)
_FOLLOWS = (-1, -1, 1, 1, -1, 4)
"""Segment that each segment follows in the comparison with shared prefixes. This includes segments
with fewer queries than keys, and keys that no window reaches."""
_WINDOW = 100
"""Maximum attention window in the comparison. A model's own window would cover all tokens."""
_MAX_ERROR = 0.02
"""Maximum relative error. Rounding to bfloat16 gives 0.003, and a wrong gradient 0.2."""


def use_flash4(
    model: PreTrainedModel, device: torch.device, cache_dir: Path, *, sequence_parallel: int = 1
) -> str:
    """Use FlashAttention-4 for the attention of `model` in this process. Returns "", or why its
    kernels cannot be used, such as wrong results for the model's head size.

    Compiled kernels are cached in `cache_dir`. By default, the package either doesn't cache them on
    disk or uses a folder in /tmp that any user could have created.
    """
    text: Any = model.config.get_text_config()
    if model.dtype not in (torch.float16, torch.bfloat16):
        return f"it needs half precision, but model.dtype is {model.dtype}"
    if getattr(text, "kv_lora_rank", None) is not None:
        return "keys and values of latent attention have different sizes"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in _GENERATIONS:
        return f"it needs compute capability 9 or 10, this GPU has {major}.{minor}"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    folder = cache_dir / f"attention-{major}.{minor}"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    heads //= sequence_parallel
    kv_heads = lcm(kv_heads, sequence_parallel) // sequence_parallel
    window = getattr(text, "sliding_window", None)
    windows = [None] if window is None else [None, min(_WINDOW, window)]
    try:
        if not _ACTIVE:
            _ACTIVE.append(replace_flash_kernels(__name__))
        reason = find_error(heads, kv_heads, width, windows, device, model.dtype)
    except ModuleNotFoundError as error:
        reason = f"is not installed (no module {error.name})"
    except Exception as error:  # compilers, drivers, file locks
        reason = f"fails: {type(error).__name__}: {error}"[:500]
    if not reason:
        return ""
    restore_torch_kernels()
    return f"{PACKAGE} {reason}"


def restore_torch_kernels() -> None:
    """Use PyTorch's own kernels for attention again."""
    while _ACTIVE:
        _ACTIVE.pop().remove()


def find_error(
    heads: int,
    kv_heads: int,
    width: int,
    windows: Sequence[int | None],
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """Compare attention in half precision, results and gradients, with plain float32 attention.
    Returns the first error that is too large, or "". For example, version 4.0.0b36 silently
    returned wrong gradients for a head size of 16."""
    drawn = torch.Generator(device).manual_seed(0)
    inputs = [
        torch.randn(sum(_PROBE), count, width, device=device, dtype=dtype, generator=drawn)
        for count in (heads, kv_heads, kv_heads, heads)
    ]
    for window in windows:
        for follows in (None, _FOLLOWS):
            segments = Segments.of(_PROBE, device, follows=follows)
            ours = _attention_and_grads(inputs, segments, window)
            exact = _attention_and_grads([x.float() for x in inputs], segments, window)
            named = ("results", "gradients of Q", "gradients of K", "gradients of V")
            for what, one, other in zip(named, ours, exact, strict=True):
                error = float((one - other).norm() / other.norm())
                if not error < _MAX_ERROR:
                    return f"gives {what} that are off by {error:.0%} for heads of {width}"
    return ""


def _attention_and_grads(
    inputs: Sequence[Tensor], segments: Segments, window: int | None
) -> list[Tensor]:
    *leaves, grad = inputs
    query, key, value = leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        output = attend(query, key, value, segments, None, window)
        grads = torch.autograd.grad(output, leaves, grad)
    return [x.detach().float() for x in (output, *grads)]


# Called by PyTorch.


def _flash_attn_fwd(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return _package()._flash_attn_fwd(*tensors, **options)[:2]


def _flash_attn_bwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    grad: Tensor,
    logsumexp: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    # The kernels skip keys outside all windows.
    grads = {
        f"d{name}": torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        for name, x in zip("qkv", (query, key, value), strict=True)
    }
    tensors = (query, key, value, out, grad.contiguous(), logsumexp)
    _package()._flash_attn_bwd(*tensors, **options, **grads)
    return grads["dq"], grads["dk"], grads["dv"]


@cache
def _package() -> Any:
    return import_module("flash_attn.cute.interface")
