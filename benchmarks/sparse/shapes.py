"""Sizes of benchmarks/sparse/held.py: of the model, of its text and of its training."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    head: int
    """Half as much again has a rotary embedding."""
    latent: int
    index_heads: int
    index_size: int
    vocabulary: int
    characters: int
    """To learn from, at most."""
    context: int
    top_k: tuple[int, ...]
    rows: int
    """Contexts of a step."""
    micro_batch_tokens: int
    dense_steps: int
    dense_lr: float
    warm_up_steps: int
    warm_up_lr: float
    held_out: int
    """Contexts that are measured."""


SMALL = Shape(
    layers=3,
    hidden=128,
    heads=4,
    head=32,
    latent=64,
    index_heads=4,
    index_size=32,
    vocabulary=1024,
    characters=3_000_000,
    context=256,
    top_k=(8, 16, 32, 64),
    rows=4,
    micro_batch_tokens=1024,
    dense_steps=300,
    dense_lr=3e-3,
    warm_up_steps=100,
    warm_up_lr=5e-3,
    held_out=32,
)
LARGE = Shape(
    layers=8,
    hidden=512,
    heads=8,
    head=64,
    latent=256,
    index_heads=8,
    index_size=64,
    vocabulary=8192,
    characters=60_000_000,
    context=2048,
    top_k=(32, 64, 128, 256, 512),
    rows=16,
    micro_batch_tokens=32_768,
    dense_steps=3000,
    dense_lr=1e-3,
    warm_up_steps=1000,
    warm_up_lr=1e-3,
    held_out=64,
)


def at_context(shape: Shape, context: int) -> Shape:
    """With the same k/T and the same number of tokens in a step."""
    return replace(
        shape,
        context=context,
        top_k=tuple(k * context // shape.context for k in shape.top_k),
        rows=max(1, shape.rows * shape.context // context),
        held_out=max(1, shape.held_out * shape.context // context),
    )
