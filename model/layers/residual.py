"""The residual stream in float32 (`model.residual_dtype`), in the trainer as in the engines
(`keel.rollout.engine.patches`).

In half precision the stream is rounded after each block's output is added to it, two times a layer,
and engine and trainer round it differently. In float32 what is left is the rounding inside blocks:
they take and give half precision as before, but for the last product of attention and of the MLP,
whose sums are added to the stream as the GEMM has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

from keel.model.transformers_internals import override

OUTPUTS = ("self_attn.o_proj", "mlp.down_proj")
"""Of a decoder layer: what it adds to the stream. Experts add theirs up in half precision."""


def use_float32_residual(model: PreTrainedModel) -> None:
    """Have `model`'s decoder add up in float32; weights do not change. One whose weights are
    float32 does so already."""
    if model.dtype == torch.float32:
        return
    decoder: Any = model.get_decoder()
    for layer in decoder.layers:
        override(layer, _Layer)
        for name, module in layer.named_modules():
            if name in OUTPUTS:
                override(module, _Output)
    for module in decoder.modules():
        if "RMSNorm" in type(module).__name__:
            override(module, _Norm)


def summed(input: Tensor, weight: Tensor) -> Tensor:
    """input [..., k] · weightᵀ, of weight [n, k] → [..., n] in float32: products of half precision,
    added up in float32 and not rounded."""
    if not input.is_cuda:
        return linear(input.float(), weight.float())
    out = torch.mm(input.flatten(0, -2), weight.T, out_dtype=torch.float32)
    return out.unflatten(0, input.shape[:-1])


class _Layer(nn.Module):
    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Not in `forward`, which is compiled, and would be once more for the first layer."""
        return super().__call__(hidden_states.float(), *args, **kwargs)


class _Norm(nn.Module):
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """What a block takes is in half precision; the stream is the only input that is not."""
        return super().forward(hidden_states).to(self.weight.dtype)


class _Output(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        out = _Summed.apply(input, self.weight)
        return out if self.bias is None else out + self.bias


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return summed(input, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """In half precision, as of any linear layer."""
        input, weight = ctx.saved_tensors
        grad = grad.to(input.dtype)
        of_input, of_weight = ctx.needs_input_grad
        return (
            grad @ weight if of_input else None,
            grad.flatten(0, -2).T @ input.flatten(0, -2) if of_weight else None,
        )
