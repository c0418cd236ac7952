"""Attention by chunks of queries: what has an entry for each query and key is never held whole.

The forward pass keeps inputs and outputs alone; the backward pass computes each chunk again, with
its graph, and lets go of it before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Chunk = Callable[..., tuple[Tensor, ...]]
"""(number of the first query, of each query [B, c, …] …, of each key [B, s, …] …) → outputs
[B, c, …] …, the keys being those up to the last query's."""


def by_chunks(
    chunk: Chunk, queries: Sequence[Tensor], keys: Sequence[Tensor], *, size: int
) -> tuple[Tensor, ...]:
    """`chunk` on `size` queries at a time: queries and keys [B, L, …] → outputs [B, L, …].

    Gradients of keys are summed over chunks in float32.
    """
    return _ByChunks.apply(chunk, size, len(queries), *queries, *keys)  # type: ignore[return-value]


class _ByChunks(Function):
    @staticmethod
    def forward(
        ctx: Any, chunk: Chunk, size: int, queries: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.chunk, ctx.size, ctx.queries = chunk, size, queries
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        starts = range(0, tensors[0].shape[1], size)
        parts = [chunk(first, *_part(tensors, queries, first, first + size)) for first in starts]
        return tuple(torch.cat(part, 1) for part in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[3:]
        sums: list[Tensor | None] = [None] * len(tensors)  # of what is reached by any gradient
        for first in range(0, tensors[0].shape[1], ctx.size):
            stop = first + ctx.size
            parts = _part(tensors, ctx.queries, first, stop)
            inputs = [
                x.detach().requires_grad_(want) for x, want in zip(parts, wanted, strict=True)
            ]
            with torch.enable_grad():
                outputs = ctx.chunk(first, *inputs)
            used = [
                (output, grad[:, first:stop])
                for output, grad in zip(outputs, grads, strict=True)
                if grad is not None and output.requires_grad
            ]
            if not used:
                continue
            leaves = [at for at, want in enumerate(wanted) if want]
            found = torch.autograd.grad(
                [output for output, _ in used],
                [inputs[at] for at in leaves],
                [grad for _, grad in used],
                allow_unused=True,
            )
            for at, grad in zip(leaves, found, strict=True):
                if grad is None:
                    continue
                of_query, x = at < ctx.queries, tensors[at]
                total = sums[at]
                if total is None:
                    total = torch.zeros_like(x, dtype=x.dtype if of_query else torch.float32)
                    sums[at] = total
                total[:, first if of_query else 0 : stop] += grad
        gradients = (
            None if total is None else total.to(x.dtype)
            for total, x in zip(sums, tensors, strict=True)
        )
        return None, None, None, *gradients


def _part(tensors: Sequence[Tensor], queries: int, first: int, stop: int) -> list[Tensor]:
    """Of queries `first` … `stop` − 1, and of the keys that they may see."""
    return [x[:, first if at < queries else 0 : stop] for at, x in enumerate(tensors)]
