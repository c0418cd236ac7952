"""Expert parallelism: the experts of a layer spread over ranks by DeepSpeed AutoEP.

AutoEP puts a layer of its own where a MoE block was: a router over all experts and this rank's
share of them, with an all-to-all on either side. Here is what the rest of the trainer needs to see
none of that: the names and shapes that the weights had before, and the gradient norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedConfig

from keel.trainer.engine.deepspeed_internals import (
    WEIGHTS,
    check_experts,
    expert_group,
    expert_group_name,
    expert_layers,
    original_names,
    ranks_of,
    split_experts,
)
from keel.trainer.engine.state.pieces import Run

LAYERS = r"model\.model\.layers\.\d+\.mlp"
"""Where MoE blocks are inside a `PolicyNetwork`."""

Named = dict[str, Tensor]


def autoep_config(size: int, text: PreTrainedConfig, *, grouped: bool) -> dict[str, Any]:
    """DeepSpeed's section `expert_parallel`. `text`: of the model. `grouped`: one grouped GEMM for
    a rank's experts (bfloat16 on a GPU), else one after the other."""
    greedy = text.model_type == "deepseek_v2" and getattr(text, "topk_method", "") == "greedy"
    groups: dict[str, int] = {}
    if greedy and (getattr(text, "n_group", None) or 1) > 1:
        # AutoEP limits a token's experts by groups wherever there are any (0.19.8).
        groups = {"num_expert_groups": 1, "num_limited_groups": 1}
    return {
        **groups,
        "enabled": True,
        "autoep_size": size,
        "use_grouped_mm": grouped,
        "moe_layer_pattern": LAYERS,
    }


class ExpertLayers:
    """The AutoEP layers of a model that DeepSpeed has taken over."""

    def __init__(self, model: nn.Module, *, expected: int) -> None:
        """`expected`: MoE layers that the model had. Raises `RuntimeError` if AutoEP found others.

        A model without any (`expected` = 0) is left as it is by everything here.
        """
        self._layers = expert_layers(model) if expected else {}
        if len(self._layers) != expected:
            raise RuntimeError(
                f"DeepSpeed AutoEP took over {len(self._layers)} of {expected} MoE layers of "
                f"{type(model).__name__}. Set trainer.expert_parallel to 1"
            )
        if expected:
            check_experts(self._layers.values())

    @property
    def spread(self) -> bool:
        """Whether there are any."""
        return bool(self._layers)

    def original(self, part: Mapping[str, Tensor]) -> Named:
        """One module's own tensors, whole and named as they were before AutoEP.

        Of a layer's experts every rank has its share: they are gathered, so all ranks must call
        this in the same order. Other tensors are only renamed.
        """
        names = list(part)
        found = self._find(names[0])
        if found is None:
            return dict(part)
        prefix, layer = found
        if names[0].startswith(f"{prefix}.experts."):
            return _whole_experts(prefix, layer, part)
        cut = len(prefix) + 1
        return {f"{prefix}.{_renamed(name[cut:], layer)}": part[name] for name in names}

    def runs(self, name: str, shape: Sequence[int]) -> list[Run]:
        """Where the elements of a parameter of this `shape`, as this rank has it, are in the whole
        ones that there were before AutoEP."""
        count = math.prod(shape)
        found = self._find(name)
        if found is None:
            return [Run(0, count, name, 0)]
        prefix, layer = found
        local = name.removeprefix(f"{prefix}.")
        if not local.startswith("experts."):
            return [Run(0, count, f"{prefix}.{_renamed(local, layer)}", 0)]
        names = original_names(layer)
        first = dist.get_rank(ranks_of(layer)) * shape[0]  # of its experts, among all of them
        gate, down, _ = (f"experts.{w}" for w in WEIGHTS)
        each = count // shape[0]
        if local == down:
            return [Run(0, count, f"{prefix}.{names.down}", first * each)]
        row = 0 if local == gate else 1  # an expert's gate projection stands before its up one
        whole = f"{prefix}.{names.gate_and_up}"
        return [Run(e * each, each, whole, (2 * (first + e) + row) * each) for e in range(shape[0])]

    def _find(self, name: str) -> tuple[str, Any] | None:
        """The layer that a tensor of this name is in, and the layer's own name."""
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            prefix = ".".join(parts[:length])
            if prefix in self._layers:
                return prefix, self._layers[prefix]
        return None


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale gradients in place so that their global norm is at most `limit`; the norm before.

    Ranks of an expert-parallel group hold different experts, whose squares are added up; all else
    is the same on every rank. For gradients that no ZeRO stage has taken (there DeepSpeed clips).
    """
    parameters = [p for p in parameters if p.grad is not None]
    shared, experts = split_experts(parameters)
    norm = get_total_norm([p.grad for p in shared if p.grad is not None])
    if experts:
        square = get_total_norm([p.grad for p in experts if p.grad is not None]) ** 2
        dist.all_reduce(square, group=expert_group(experts[0]))
        norm = (norm**2 + square).sqrt()
    clip_grads_with_norm_(parameters, limit, norm)
    return float(norm)


def by_expert_group(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """`parameters` as AdamW's groups, those of experts marked for ZeRO, which reduces them over
    the ranks that hold the same experts."""
    shared, experts = split_experts(parameters)
    groups: list[dict[str, Any]] = [{"params": shared}] if shared else []
    if experts:
        groups.append({"params": experts, "moe": True, "name": expert_group_name(experts[0])})
    return groups


def _renamed(local: str, layer: Any) -> str:
    """AutoEP's name of a router's or shared expert's tensor → transformers' own."""
    names = original_names(layer)
    for ours, theirs in (
        ("router.gate.", names.router),
        ("router.", names.router),
        ("shared_experts.", names.shared_experts),
        ("shared_experts_gate.", names.shared_experts_gate),
    ):
        if local.startswith(ours):
            return f"{theirs}.{local.removeprefix(ours)}"
    return local


def _whole_experts(prefix: str, layer: Any, part: Mapping[str, Tensor]) -> Named:
    """w1, w3 [E/P, F, H] and w2 [E/P, H, F] of this rank → transformers' fused tensors of all E."""
    names = original_names(layer)
    gate, down, up = (_gather(part[f"{prefix}.experts.{w}"], ranks_of(layer)) for w in WEIGHTS)
    return {
        f"{prefix}.{names.gate_and_up}": torch.cat([gate, up], dim=1),
        f"{prefix}.{names.down}": down,
    }


def _gather(share: Tensor, group: ProcessGroup | None) -> Tensor:
    """[E/P, …] of each rank → [E, …], in the order of ranks, which is that of experts."""
    share = share.detach().contiguous()
    whole = share.new_empty(len(share) * dist.get_world_size(group), *share.shape[1:])
    dist.all_gather_into_tensor(whole, share, group=group)
    return whole
