"""Add LoRA adapters (`model.lora`) with peft. They are merged into the base weights whenever
weights leave the trainer.

A target layer computes (W + (alpha / rank) B A) x, where only A [rank, in] and B [out, rank] are
trained. Each expert of a mixture of experts has its own A and B. Engines and exported models get
the same sum, rounded to the dtype of W in the same way, under the name of W.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from keel.configs.schema import EXPERTS, LoraConfig
from keel.model.routing import router_modules
from keel.model.transformers_internals import override_methods, switch_adapter

MLP = ("gate_proj", "up_proj", "down_proj", "shared_expert_gate")
"""Layers that get no adapters in a mixture of experts, because peft treats layers with the names of
projections as experts."""
_EXPERT_WEIGHTS = (f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj")
_NAME = "default"
"""Name of the adapter in peft."""


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> None:
    """Freeze `model` and add a LoRA adapter to each layer whose name is in `config.targets`, or to
    all linear layers that can have one if there are no targets. The adapter's B matrix is
    initialized to zero, so the policy is unchanged at first. Raises ValueError if no layer
    matches."""
    from peft import inject_adapter_in_model  # noqa: PLC0415  (takes seconds)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        widths = adapter_widths(model, experts=bool(router_modules(model)))
        inject_adapter_in_model(_peft_config(config, config.names(widths), ""), model)
    for _, layer in _adapted_layers(model):
        override_methods(layer, _MergedExperts if _has_experts(layer) else _MergedForward)


class _MergedExperts:
    """Forward method of adapted experts, which uses their merged weights (see `_MergedForward`)."""

    def forward(self: Any, *inputs: Tensor) -> Tensor:
        experts = self.get_base_layer()
        if self.disable_adapters:
            return experts(*inputs)
        return functional_call(experts, _merge_experts(self), inputs)


class _MergedForward:
    """Forward method of adapted linear layers. It uses the merged and rounded weight W + B A, just
    like the engine. peft would compute W x + B A x instead, which does not include this
    rounding."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.disable_adapters:
            return self.base_layer(x)
        base, a, b = _parts(self)
        return _MergedLinear.apply(x, base.weight, base.bias, a, b, self.scaling[_NAME])


class _MergedLinear(torch.autograd.Function):
    """Computes x (W + s B A)ᵀ + bias. The merged weight is computed again in the backward pass, so
    no layer keeps a second copy of its weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return F.linear(x, _merge(weight, a, b, scale), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight, a, b = ctx.saved_tensors
        rows, outputs = x.flatten(0, -2), gradient.flatten(0, -2)
        of_a = ctx.scale * ((outputs @ b).T @ rows)
        of_b = ctx.scale * (outputs.T @ (rows @ a.T))
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ _merge(weight, a, b, ctx.scale)
        return of_x, None, None, of_a, of_b, None


def _parts(layer: Any) -> tuple[Any, Tensor, Tensor]:
    return layer.base_layer, layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight


def _merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.addmm(weight, b, a, alpha=scale)  # one GEMM that rounds once


def _has_experts(layer: Any) -> bool:
    return hasattr(layer, "parameter_name")


def _merge_experts(layer: Any) -> dict[str, Tensor]:
    """Return the merged weights of a module of experts by their names in the module. peft nests a
    layer for each weight."""
    merged: dict[str, Tensor] = {}
    while is_adapted(layer):
        b, a, scale = layer.get_delta_factors(_NAME)  # [experts, out, rank], [experts, rank, in]
        merged[layer.parameter_name] = torch.baddbmm(layer.get_param(), b, a, alpha=scale)
        layer = layer.base_layer
    return merged


def adapter_widths(model: PreTrainedModel, *, experts: bool) -> dict[str, int]:
    """Return the sum of input and output widths of all layers with the same name, such as q_proj,
    and of all experts. Layers that can't have an adapter don't count: the output layer and, in a
    mixture of experts (`experts`), those named in `MLP`."""
    left_out = MLP if experts else ()
    widths: Counter[str] = Counter()
    decoder = model.get_decoder()
    for path, layer in decoder.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(layer, nn.Linear) and name not in left_out:
            widths[name] += layer.in_features + layer.out_features
    for name, weight in decoder.named_parameters():
        if name.endswith(_EXPERT_WEIGHTS) and weight.ndim == 3:
            count, *sides = weight.shape
            widths[EXPERTS] += count * sum(sides)
    return widths


def _peft_config(config: LoraConfig, targets: Sequence[str], base: str) -> Any:
    from peft import LoraConfig as PeftConfig  # noqa: PLC0415

    return PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType] (any number works)
        target_modules=[name for name in targets if name != EXPERTS],
        target_parameters=[*_EXPERT_WEIGHTS] if EXPERTS in targets else None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if is_adapted(module):
            yield name, module


def is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


@torch.no_grad()
def merged_tensors(prefix: str, layer: Any) -> dict[str, Tensor]:
    """Return the biases and the merged weights of the layer `prefix`, exactly as the trainer uses
    them."""
    if _has_experts(layer):
        merged = _merge_experts(layer)
    else:
        base, a, b = _parts(layer)
        merged = {"weight": _merge(base.weight, a, b, layer.scaling[_NAME])}
    tensors = dict(layer.get_base_layer().named_parameters()) | merged
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Turn off the adapters in this context, so that `model` acts as the base model, which is the
    reference policy."""
    layers = [layer for _, layer in _adapted_layers(model)]
    for layer in layers:
        switch_adapter(layer, on=False)
    try:
        yield
    finally:
        for layer in layers:
            switch_adapter(layer, on=True)


def save_adapter(folder: Path, model: PreTrainedModel, config: LoraConfig, base: str) -> None:
    """Save the adapter in peft's format. `base` is the model it was trained on."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name}.{part}.weight": getattr(layer, part)[_NAME].weight.detach()
        for name, layer in _adapted_layers(model)
        for part in ("lora_A", "lora_B")
    }
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor.cpu().clone() for name, tensor in tensors.items()}, file)
    file.chmod(folder.stat().st_mode & 0o666)  # safetensors makes it private to its owner
    paths = [name.removesuffix(".base_layer") for name, _ in _adapted_layers(model)]
    names = sorted({path.rpartition(".")[2] for path in paths})
    _peft_config(config, names, base).save_pretrained(folder)
