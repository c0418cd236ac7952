"""vLLM's decoder layers with the residual stream in float32, as the trainer has it then
(`keel.model.layers.residual`).

vLLM's layers pass the stream from norm to norm, which add a block's output to it: with norms that
return their sum as it is, it is float32 from the first sum on. Both are vLLM's extension points:
classes that it builds in place of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import rms_norm
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

from keel.model.layers.residual import OUTPUTS, summed

_made: list[Summed] = []
"""Of engines that were built since `install`."""


def install(*, wanted: bool) -> None:
    """For engines that are built in this process from now on."""
    _made.clear()
    for kind in (Float32Norm, Float32Output):
        name = kind.__bases__[0].__name__
        op_registry_oot.pop(name, None)
        if wanted:
            op_registry_oot[name] = kind


def check_built(layers: int) -> None:
    """Raises RuntimeError unless so many layers' attention or more gives float32."""
    if len(_made) < layers:
        raise RuntimeError(
            f"model.residual_dtype = 'float32': of {layers} layers only {len(_made)} products "
            "could be set up (vLLM calls them otherwise, or the checkpoint is quantised). Leave it "
            "out"
        )


class Float32Norm(RMSNorm):
    """Adds a block's output to the stream in float32, and rounds what it gives the next block."""

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return super().forward_native(x)
        total = x.float() + residual.float()
        weight = self.weight.data
        out = rms_norm(total, weight.shape, weight.float(), self.variance_epsilon)
        return out.to(weight.dtype), total

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return self.forward_native(x, residual)


class Float32Output(RowParallelLinear):
    """The last product of a block, not rounded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.prefix.endswith(OUTPUTS) and type(self.quant_method) is UnquantizedLinearMethod:
            self.quant_method = Summed()
            _made.append(self.quant_method)


class Summed(UnquantizedLinearMethod):
    def process_weights_after_loading(self, layer: Any) -> None:
        """On CPUs vLLM would pack them for a kernel of its own."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = summed(x, layer.weight)
        return out if bias is None else out + bias
