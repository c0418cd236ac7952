"""The trainer's float32 residual stream (`model.residual_dtype`). The engine's is in
`keel.rollout.engine.patches`.

In half precision, the stream is rounded twice per layer, and engine and trainer round differently.
In float32, only the rounding inside blocks remains: the last GEMM in attention and in the MLP adds
its float32 sums to the stream.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

from keel.model.transformers_internals import override_methods

OUTPUTS = ("self_attn.o_proj", "mlp.down_proj")
"""Modules whose outputs are added to the stream. Experts are summed in half precision."""


def use_float32_residual(model: PreTrainedModel) -> None:
    """Keep the residual stream of `model`'s decoder in float32."""
    if model.dtype == torch.float32:  # nothing to do
        return
    decoder: Any = model.get_decoder()
    for layer in decoder.layers:
        override_methods(layer, _Layer)
        for name, module in layer.named_modules():
            if name in OUTPUTS:
                override_methods(module, _Output)
    for module in decoder.modules():
        if "RMSNorm" in type(module).__name__:
            override_methods(module, _Norm)


def linear_float32(input: Tensor, weight: Tensor) -> Tensor:
    """Compute input [..., k] · weight [n, k]ᵀ → [..., n] with an unrounded float32 result."""
    if not input.is_cuda:
        return linear(input.float(), weight.float())
    out = torch.mm(input.flatten(0, -2), weight.T, out_dtype=torch.float32)
    return out.unflatten(0, input.shape[:-1])


class _Layer(nn.Module):
    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Cast the hidden states to float32 before calling the compiled `forward`, which would
        otherwise be recompiled for the first layer."""
        return super().__call__(hidden_states.float(), *args, **kwargs)


class _Norm(nn.Module):
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states).to(self.weight.dtype)


class _Output(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        out = _Summed.apply(input, self.weight)
        return out if self.bias is None else out + self.bias


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return linear_float32(input, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        grad = grad.to(input.dtype)
        of_input, of_weight = ctx.needs_input_grad
        return (
            grad @ weight if of_input else None,
            grad.flatten(0, -2).T @ input.flatten(0, -2) if of_weight else None,
        )
