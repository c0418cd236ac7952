"""Finds the routers in mixture-of-experts models, and describes how each kind weighs its experts.

`ROUTERS` maps the name of each router class to its replay functions. Names are used so that no
model code has to be imported. docs/adding-a-model-family.md shows how to add a class.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Output = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Router:
    """Functions for replaying a router class. Its instances must have `top_k` and `num_experts`."""

    experts: Callable[[Output], Tensor]
    """Takes the router's output and returns the chosen experts [tokens, K]."""
    replay: Callable[[Any, Output, Tensor], Output]
    """Takes (router, output, experts [tokens, K] int64) and returns the output for these experts.
    The weights come from the current scores and are differentiable."""
    gate: str = ""
    """The submodule that computes the logits, for routers whose output does not include them. Its
    logits are prepended to the output. The submodule is not simply called again, because under
    ZeRO-3 such a call is a collective, and ranks without routes to replay would not take part."""


def _triple(weigh: Callable[[Any, Tensor, Tensor], Tensor]) -> _Router:

    def replay(router: Any, output: Output, experts: Tensor) -> Output:
        logits, weights, _live = output
        return logits, weigh(router, logits, experts).to(weights.dtype), experts

    return _Router(experts=lambda output: output[2], replay=replay)


def _softmax(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
    return weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights


def _softmax_normalised(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
    return weights / weights.sum(-1, keepdim=True)


def _softmax_scaled(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Compute the weights as in DeepSeek-V2. Group limits affect only which experts are chosen."""
    weights = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
    return weights * router.routed_scaling_factor


def _softmax_of_chosen(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    return logits.gather(1, experts).softmax(-1)


def _sigmoid_scaled(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Compute the weights as in DeepSeek-V3. The correction bias affects only which experts are
    chosen."""
    weights = logits.sigmoid().gather(1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


def _sigmoid_normalised(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.float().sigmoid().gather(1, experts)
    return weights / weights.sum(-1, keepdim=True)


def _autoep(router: Any, output: Output, experts: Tensor) -> Output:
    """Return the output in DeepSpeed AutoEP's format: (weights, experts, tokens per expert)."""
    logits, weights, _live, counts = output
    logits = logits.float()
    scores = logits.sigmoid() if router.score_func == "sigmoid" else logits.softmax(-1)
    chosen = scores.gather(1, experts)
    if router.route_norm:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    flat = experts.reshape(-1)
    counts = torch.zeros_like(counts).scatter_add_(
        0, flat, torch.ones_like(flat, dtype=counts.dtype)
    )
    return (chosen * router.route_scale).to(weights.dtype), experts, counts


ROUTERS: Mapping[str, _Router] = {
    "DeepseekV2TopkRouter": _triple(_softmax_scaled),
    "DeepseekV32TopkRouter": _triple(_sigmoid_scaled),
    "DeepseekV3TopkRouter": _triple(_sigmoid_scaled),
    "FlexOlmoTopKRouter": _triple(_softmax),
    "Glm4MoeLiteTopkRouter": _triple(_sigmoid_scaled),
    "Glm4MoeTopkRouter": _triple(_sigmoid_scaled),
    "GlmMoeDsaTopkRouter": _triple(_sigmoid_scaled),
    "GptOssTopKRouter": _triple(_softmax_of_chosen),
    "MiniMaxM2TopKRouter": _triple(_sigmoid_normalised),
    "MixtralTopKRouter": _triple(_softmax_normalised),
    "OlmoeTopKRouter": _triple(_softmax),
    "Qwen2MoeTopKRouter": _triple(_softmax),
    "Qwen3MoeTopKRouter": _triple(_softmax),
    "Qwen3NextTopKRouter": _triple(_softmax),
    "Qwen3_5MoeTopKRouter": _triple(_softmax_normalised),
    "TokenChoiceTopKRouter": _Router(experts=lambda output: output[2], replay=_autoep, gate="gate"),
}

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LOOKS_ROUTED = re.compile(r"(Router|Experts|MoE|Moe|MoEBlock|MoeBlock)$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def is_moe(config: Any) -> bool:
    """Return whether a transformers config describes a mixture of one or more experts."""
    config = config.get_text_config()
    return any((getattr(config, name, None) or 0) > 0 for name in _EXPERT_COUNTS)


def router_modules(module: nn.Module) -> list[nn.Module]:
    """Return the routers in `module` in layer order. The list is empty for a dense model. Raises
    ValueError if the routers or experts belong to a family that is not in `ROUTERS`."""
    return list(_named_routers(module).values())


def moe_layers(model_or_config: Any) -> tuple[int, ...]:
    """Return the indices of the MoE layers in ascending order. Each family has its own rule for
    which layers these are, so the model is built on the meta device to find them."""
    model = model_or_config
    if not isinstance(model, nn.Module):
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds to import

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_or_config)
    layers = []
    for name in _named_routers(model):
        match = _LAYER.search(name)
        if match is None:
            raise ValueError(f"router {name} is not inside a numbered layer (layers.N.…)")
        layers.append(int(match[1]))
    return tuple(layers)


def _named_routers(module: nn.Module) -> dict[str, nn.Module]:
    named = [(name, type(child).__name__, child) for name, child in module.named_modules()]
    routers = {name: child for name, kind, child in named if kind in ROUTERS}
    unknown = sorted(
        {
            kind
            for _, kind, _ in named
            if kind not in ROUTERS
            and _LOOKS_ROUTED.search(kind)
            # Experts and blocks next to known routers belong to them.
            and (not routers or kind.endswith("Router"))
        }
    )
    if unknown:
        raise ValueError(
            f"{type(module).__name__}: routing of {', '.join(unknown)} is not supported. See "
            "docs/models.md for supported families, and docs/adding-a-model-family.md"
        )
    return routers
