"""Faster RMS norms and experts for GPUs. transformers runs a dozen elementwise operations for them,
which together take longer than the GEMMs. Layers with other formulas keep transformers' code, and
so do all layers on a CPU."""

import importlib.util
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm, rms_norm, silu
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from keel.model.transformers_internals import apply_gate, change_class, is_expert_parallel

_EXPERTS = "keel_grouped"


def use_fused_layers(model: PreTrainedModel) -> None:
    """Replace the supported norms and experts in `model`, keeping their weights."""
    known: dict[type[nn.Module], bool] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in known:
            known[kind] = _is_rms_norm(module)
        if known[kind]:
            change_class(module, _fused_norm(kind))
    if fuses_experts(model):
        ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _experts_forward)
        model.set_experts_implementation(_EXPERTS)


def fuses_norms(model: nn.Module) -> bool:
    """Return True if every RMS norm in `model` can run as a single kernel."""
    norms = {
        type(module): module for module in model.modules() if "RMSNorm" in type(module).__name__
    }
    return all(isinstance(norm, nn.RMSNorm) or _is_rms_norm(norm) for norm in norms.values())


def fuses_experts(model: nn.Module) -> bool:
    """Return True if `model` has experts and `fused_experts` supports all of them."""
    experts = [module for module in model.modules() if hasattr(module, "gate_up_proj")]
    return bool(experts) and all(map(_is_plain, experts))


def _experts_forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    fast = hidden.is_cuda and hidden.dtype == torch.bfloat16 and _has_triton()
    if not fast or is_expert_parallel(experts):
        return grouped_mm_experts_forward(experts, hidden, chosen, weights)
    return fused_experts(hidden, chosen, weights, experts.gate_up_proj, experts.down_proj)


def fused_experts(
    hidden: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Compute Σ_k weights · down[e] · (silu(gate) · up) for the chosen experts e, where [gate, up]
    = gate_up[e] · hidden.

    Shapes: hidden [T, d], chosen and weights [T, K], gate_up [E, 2·I, d], down [E, d, I]. Returns
    [T, d]. Does not synchronize with the device.
    """
    count = len(gate_up)
    kind = torch.uint8 if count <= 256 else torch.int32  # short keys sort faster
    sorted_, order = chosen.flatten().to(kind).sort(stable=True)
    position = torch.empty_like(order, dtype=torch.int32)
    position[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    experts = torch.arange(count, device=order.device)
    ends = torch.searchsorted(sorted_.int(), experts.int(), right=True, out_int32=True)
    rows = _Spread.apply(hidden, position, chosen.shape[1])
    packed = grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
    rows = grouped_mm(_Swiglu.apply(packed), down.transpose(1, 2), offs=ends)
    return _Combine.apply(rows, weights.contiguous(), position)


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, position: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(position)
        ctx.per_token = per_token
        return _kernels().dispatch(tokens.contiguous(), position, per_token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (position,) = ctx.saved_tensors
        return _kernels().combine(grad.contiguous(), None, position, ctx.per_token), None, None


class _Swiglu(Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor) -> Tensor:
        packed = packed.contiguous()
        ctx.save_for_backward(packed)
        return _kernels().swiglu(packed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (packed,) = ctx.saved_tensors
        return _kernels().swiglu_gradient(grad.contiguous(), packed)


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, position: Tensor) -> Tensor:
        rows = rows.contiguous()
        ctx.save_for_backward(rows, weights, position)
        return _kernels().combine(rows, weights, position, weights.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights, position = ctx.saved_tensors
        return *_kernels().combine_gradients(grad.contiguous(), rows, weights, position), None


@cache  # one class for all layers, so that they share compiled code
def _fused_norm(kind: type[nn.Module]) -> type[nn.Module]:

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if hidden_states.dtype == torch.float32:  # a float32 residual stream
            weight = weight.float()
        if not hidden_states.is_cuda or hidden_states.dtype != weight.dtype:
            return kind.forward(self, hidden_states)
        return rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@torch.no_grad()
def _is_rms_norm(module: nn.Module) -> bool:
    """Return True if the module computes weight · x / rms(x) rather than (1 + weight) · x /
    rms(x)."""
    weight, name = getattr(module, "weight", None), type(module).__name__
    if "RMSNorm" not in name or "Gated" in name or not hasattr(module, "variance_epsilon"):
        return False
    if not isinstance(weight, Tensor) or weight.ndim != 1 or len(list(module.parameters())) != 1:
        return False
    probe: Any = deepcopy(module)
    if weight.is_meta:
        probe = probe.to_empty(device="cpu")
    probe = probe.to("cpu", torch.float32)
    size = len(weight)
    probe.weight.data = torch.linspace(0.5, 1.5, size)
    hidden = torch.linspace(-2, 3, 2 * size).view(2, size)
    expected = rms_norm(hidden, (size,), probe.weight, probe.variance_epsilon)
    return torch.allclose(probe(hidden), expected, atol=1e-5)


def _is_plain(experts: Any) -> bool:
    flags = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    if any(getattr(experts, name, None) is not value for name, value in flags.items()):
        return False
    packed = torch.linspace(-3, 3, 8)[None]
    gate, up = packed.chunk(2, -1)
    activated = apply_gate(experts, packed)
    return activated is not None and torch.allclose(activated, silu(gate) * up)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _kernels() -> Any:
    from keel.model.layers import kernels  # noqa: PLC0415  (Triton is on GPU machines only)

    return kernels
