"""FlashAttention-4's kernels for packed rows, as operators of PyTorch: for GPUs of Hopper's and
Blackwell's generations, and a package of its own (flash-attn-4).

From about 16,000 tokens on they take half as long as PyTorch's own (flash attention 2), forward and
backward, and they accept heads whose keys and values differ in width. The package's autograd
function cannot be traced into a compiled layer, so its forward and backward halves are wrapped as
operators. These halves are not public: `check_kernels` verifies them first.
"""

from __future__ import annotations

import inspect
import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GENERATIONS = (9, 10)
"""Of CUDA's compute capability, the major number: Hopper and Blackwell."""
PACKAGE, INSTALL = "flash_attn.cute", "flash-attn-4 (Keel's extra `gpu` has it)"
_FORWARD = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale causal lse out"
_BACKWARD = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale causal dq dk dv"
_WINDOW = "window_size_left window_size_right"


def missing(device: torch.device, folder: Path) -> str:
    """Why these kernels cannot run on this device; empty if they can. folder: where those that are
    compiled are kept for later runs, for each kind of GPU by itself; the package keeps none, or in
    a folder of /tmp that anybody could have made."""
    if device.type != "cuda":
        return "they are for GPUs"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in GENERATIONS:
        return f"they are for compute capability 9 and 10, and this GPU has {major}.{minor}"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    own = folder / f"attention-{major}.{minor}"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(own))
    return check_kernels()


def check_kernels() -> str:
    """What is missing of the package, wherever this runs; empty if nothing is."""
    try:
        if not find_spec(PACKAGE.partition(".")[0]) or not find_spec(PACKAGE):
            return f"{INSTALL} is not installed"
        kernels = _kernels()
    except Exception as error:  # of compilers, drivers and packages of many makers
        return f"{INSTALL} does not load: {type(error).__name__}: {error}"
    for name, takes in (("_flash_attn_fwd", _FORWARD), ("_flash_attn_bwd", _BACKWARD)):
        half = getattr(kernels, name, None)
        known = inspect.signature(half).parameters if half else {}
        if lost := [one for one in f"{takes} {_WINDOW}".split() if one not in known]:
            return f"{INSTALL} has changed: {name} without {', '.join(lost)}"
    return ""


def fits(width: int, of_values: int, device: torch.device) -> bool:
    """Whether there are kernels for heads of keys and values so wide, in half precision."""
    if width % 8 or of_values % 8:
        return False
    if torch.cuda.get_device_capability(device)[0] == 9:
        return max(width, of_values) <= 256
    return max(width, of_values) <= 128 or (width, of_values) in ((192, 128), (256, 256))


def attend4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
    key_offsets: Tensor | None = None,
    key_longest: int = 0,
) -> Tensor:
    """Causal attention inside segments: query [N, Hq, D], key [N, Hkv, D], value [N, Hkv, Dv], such
    as `fits` → [N, Hq, Dv]. offsets: [S+1] int32; window: tokens, the token itself included.
    key_offsets and key_longest: of keys and values, where a segment has more of them than queries,
    which are then its last."""
    if key_offsets is None:
        key_offsets, key_longest = offsets, longest
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    reach = -1 if window is None else window - 1
    ends = (offsets, key_offsets, longest, key_longest)
    return _attend(query, key, value, *ends, scale, reach)[0]


def operator4() -> Any:
    """As PyTorch's dispatcher knows it."""
    return torch.ops.keel.flash4.default


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
    """And the logarithm of each softmax's sum, [Hq, N] float32. reach: tokens back; −1: all."""
    out, lse = _made(query, value)
    where = _where((offsets, key_offsets, longest, key_longest), scale, reach)
    _kernels()._flash_attn_fwd(query, key, value, **where, out=out, lse=lse, return_lse=True)
    return out, lse


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _made(query, value)


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
    """Of query, key and value. slope: [N, Hq, Dv]."""
    found = {f"d{name}": _whole(x) for name, x in zip("qkv", (query, key, value), strict=True)}
    if len(key) != len(query):  # keys that a window leaves to no query may be passed over
        found["dk"].zero_()
        found["dv"].zero_()
    where = _where((offsets, key_offsets, longest, key_longest), scale, reach)
    _kernels()._flash_attn_bwd(query, key, value, out, slope.contiguous(), lse, **where, **found)
    return found["dq"], found["dk"], found["dv"]


@_backward.register_fake
def _(
    slope: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _whole(query), _whole(key), _whole(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, offsets, key_offsets, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, offsets, key_offsets)


def _slopes(ctx: Any, slope: Tensor, of_lse: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, *offsets = ctx.saved_tensors
    found = _backward(slope, query, key, value, out, lse, *offsets, *ctx.rest)
    return *found, None, None, None, None, None, None


_attend.register_autograd(_slopes, setup_context=_keep)


def _made(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Room for an output and its logarithms."""
    tokens, heads, _ = query.shape
    out = query.new_empty((tokens, heads, value.shape[-1]))
    return out, query.new_empty((heads, tokens), dtype=torch.float32)


def _whole(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _where(ends: tuple[Tensor, Tensor, int, int], scale: float, reach: int) -> dict[str, Any]:
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
    return import_module(f"{PACKAGE}.interface")
