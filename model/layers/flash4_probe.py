"""FlashAttention-4's kernels are tried on a model's own heads before a run trusts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from math import inf, lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.model.layers.contexts import Contexts
from keel.model.layers.flash4 import INSTALL, attend4, fits


class HeadShape(NamedTuple):
    """What an attention layer's heads are like."""

    heads: int
    """Of queries."""
    of_keys: int
    width: int
    of_values: int
    window: int | None = None
    """Tokens."""

    def __str__(self) -> str:
        widths = " and ".join(str(n) for n in dict.fromkeys((self.width, self.of_values)))
        window = f", windows of {self.window}" if self.window else ""
        return f"{self.heads} and {self.of_keys} heads of {widths}{window}"


def head_shapes(model: PreTrainedModel, ranks: int = 1) -> tuple[HeadShape, ...]:
    """Of all its layers, on each of so many ranks (`keel.model.ulysses.heads_for_tokens`)."""
    text: Any = model.config.get_text_config()
    heads = text.num_attention_heads // ranks
    if getattr(text, "kv_lora_rank", None) is not None:  # a latent's keys are spread to all heads
        width = text.qk_nope_head_dim + text.qk_rope_head_dim
        return (HeadShape(heads, heads, width, text.v_head_dim),)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    of_values = getattr(text, "v_head_dim", None) or width
    of_keys = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    of_keys = lcm(of_keys, ranks) // ranks
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ())
    slides = window is not None and (not kinds or "sliding_attention" in kinds)
    windows = [None] * (not slides or len(kinds) > 1) + [window] * slides
    return tuple(HeadShape(heads, of_keys, width, of_values, one) for one in windows)


PROBE = (1, 130, 64, 7, 300, 65)
"""Tokens of segments that kernels are tried on."""
FOLLOWS = (-1, -1, 1, 1, -1, 4)
"""And once more with some that follow others (`keel.model.layers.contexts`): fewer queries than
keys, of which a window leaves some to nobody."""
WINDOW = 100
"""Tokens of the longest window that is tried: a model's own would reach over all of them."""
OFF = 0.02
"""Of what they give, as a share: bfloat16 is off by 0.003, a wrong gradient by 0.2."""


@cache
def disagreement(shapes: tuple[HeadShape, ...], device: torch.device, dtype: torch.dtype) -> str:
    """Why FlashAttention-4 is not for such heads, or not to be trusted with them: its results and
    gradients beside plain attention in float32, of random numbers. Empty if they agree.

    A try of its package (4.0.0b36) gave wrong gradients for heads of 16 numbers, and no error.
    """
    drawn = torch.Generator(device).manual_seed(0)
    for shape in shapes:
        if not fits(shape.width, shape.of_values, device):
            return f"it has no kernels for {shape}"
        sizes = (
            (shape.heads, shape.width),
            (shape.of_keys, shape.width),
            (shape.of_keys, shape.of_values),
            (shape.heads, shape.of_values),
        )
        given = [
            torch.randn(sum(PROBE), *size, device=device, dtype=dtype, generator=drawn)
            for size in sizes
        ]
        window = min(WINDOW, shape.window) if shape.window else None
        for contexts in (None, Contexts.of(PROBE, FOLLOWS, device)):
            try:
                ours = _tried(_fast, given, contexts, window, dtype)
            except Exception as error:  # of compilers and drivers; a file that cannot be locked
                return f"{INSTALL} fails for {shape}: {type(error).__name__}: {error}"[:500]
            exact = _tried(_plain, given, contexts, window, torch.float32)
            for what, one, other in zip(("results", *"QKV"), ours, exact, strict=True):
                off = float((one - other).norm() / other.norm())
                if not off < OFF:
                    of = what if what == "results" else f"gradients of {what}"
                    of += " in shared contexts" if contexts else ""
                    return f"{INSTALL} gives {of} that are off by {off:.0%} for {shape}"
    return ""


def plain(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], window: int | None = None
) -> Tensor:
    """Causal attention inside segments by the book: query [N, Hq, D], key [N, Hkv, D], value
    [N, Hkv, Dv] → [N, Hq, Dv]."""
    shared = query.shape[1] // key.shape[1]
    found: list[Tensor] = []
    for q, k, v in zip(*(x.split(list(lengths)) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        step = torch.arange(len(q), device=q.device)
        back = step[:, None] - step
        far = (back < 0) | (back >= (window or len(q)))
        found.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(far, -inf).softmax(-1), v))
    return torch.cat(found)


def _plain(
    query: Tensor, key: Tensor, value: Tensor, contexts: Contexts | None, window: int | None
) -> Tensor:
    if contexts is None:
        return plain(query, key, value, PROBE, window)
    query, key, value = (contexts.spread(x) for x in (query, key, value))
    return plain(query, key, value, contexts.lengths, window)[contexts.places]


def _fast(
    query: Tensor, key: Tensor, value: Tensor, contexts: Contexts | None, window: int | None
) -> Tensor:
    ends = torch.tensor([0, *accumulate(PROBE)], dtype=torch.int32, device=query.device)
    keys: tuple[Any, ...] = ()
    if contexts is not None:
        key, value = contexts.spread(key), contexts.spread(value)
        keys = contexts.offsets, contexts.longest
    return attend4(query, key, value, ends, max(PROBE), None, window, *keys)


def _tried(
    attend: Callable[..., Tensor],
    given: list[Tensor],
    contexts: Contexts | None,
    window: int | None,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Output and gradients, in float32."""
    *leaves, slope = (x.detach().to(dtype) for x in given)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        output = attend(*leaves, contexts, window)
        grads = torch.autograd.grad(output, leaves, slope)
    return [x.detach().float() for x in (output, *grads)]
