"""Attention by chunks of queries: what has an entry for each query and key is never held whole.

The forward pass keeps inputs and outputs alone; the backward pass computes each chunk again, with
its graph, and lets go of it before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Computed = Callable[..., tuple[Tensor, ...]]
"""(number of the first query, of each query [B, c, …] …, of each key [B, s, …] …) → outputs
[B, c, …] …, the keys being those up to the last query's."""


def by_chunks(
    chunk: Computed,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    *,
    size: int,
    first: int = 0,
) -> tuple[Tensor, ...]:
    """`chunk` on `size` queries at a time: queries [B, L, …] and keys [B, first + L, …] → outputs
    [B, L, …]. `first`: number of the first query, the first key having 0.

    Gradients of keys are summed over chunks in float32.
    """
    plan = _Plan(chunk, size, len(queries), first)
    return _ByChunks.apply(plan, *queries, *keys)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Plan:
    chunk: Computed
    size: int
    queries: int
    """So many of the tensors are about queries; the rest are about keys."""
    first: int

    def starts(self, tensors: Sequence[Tensor]) -> range:
        return range(0, tensors[0].shape[1], self.size)

    def part(self, at: int, start: int) -> slice:
        """Of tensor `at`, what the chunk that begins at `start` works on."""
        stop = start + self.size
        return slice(start, stop) if at < self.queries else slice(0, self.first + stop)

    def run(self, start: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self.chunk(self.first + start, *tensors)


class _ByChunks(Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan = plan
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        parts = [
            plan.run(start, [x[:, plan.part(at, start)] for at, x in enumerate(tensors)])
            for start in plan.starts(tensors)
        ]
        return tuple(torch.cat(part, 1) for part in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[1:]
        leaves = [at for at, want in enumerate(wanted) if want]
        sums: list[Tensor | None] = [None] * len(tensors)  # of what is reached by any gradient
        for start in plan.starts(tensors):
            inputs = [
                x[:, plan.part(at, start)].detach().requires_grad_(wanted[at])
                for at, x in enumerate(tensors)
            ]
            with torch.enable_grad():
                outputs = plan.run(start, inputs)
            used = [
                (output, grad[:, start : start + plan.size])
                for output, grad in zip(outputs, grads, strict=True)
                if grad is not None and output.requires_grad
            ]
            if not used:
                continue
            found = torch.autograd.grad(
                [output for output, _ in used],
                [inputs[at] for at in leaves],
                [grad for _, grad in used],
                allow_unused=True,
            )
            for at, grad in zip(leaves, found, strict=True):
                if grad is None:
                    continue
                x, total = tensors[at], sums[at]
                if total is None:
                    dtype = x.dtype if at < plan.queries else torch.float32
                    total = sums[at] = torch.zeros_like(x, dtype=dtype)
                total[:, plan.part(at, start)] += grad
        gradients = (
            None if total is None else total.to(x.dtype)
            for total, x in zip(sums, tensors, strict=True)
        )
        return None, *gradients
