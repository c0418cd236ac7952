"""Expert parallelism: distribute the experts of each layer over the ranks with DeepSpeed AutoEP.

AutoEP replaces each MoE block with a router for all experts, this rank's experts, and an all-to-all
exchange before and after them. This module maps AutoEP's weights back to their original names and
shapes, and computes gradient norms across ranks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedConfig

from keel.trainer.engine import deepspeed_internals as internals
from keel.trainer.engine.checkpoint import ElementRun

_LAYERS = r"model\.model\.layers\.\d+\.mlp"
"""Pattern that matches the MoE blocks inside a `PolicyNetwork`."""


def autoep_config(size: int, text: PreTrainedConfig, *, grouped: bool) -> dict[str, Any]:
    """Build the `expert_parallel` section of DeepSpeed's config.

    `text` is the language model's config. With `grouped`, a rank computes all its experts in a
    single grouped GEMM (for bfloat16 on a GPU) instead of one expert at a time.
    """
    greedy = text.model_type == "deepseek_v2" and getattr(text, "topk_method", "") == "greedy"
    groups: dict[str, int] = {}
    if greedy and (getattr(text, "n_group", None) or 1) > 1:
        # AutoEP would limit a token's experts by groups, which greedy routing ignores.
        groups = {"num_expert_groups": 1, "num_limited_groups": 1}
    # Its MoE blocks are those of DeepSeek-V3, which AutoEP knows.
    preset = {"preset_model": "deepseek_v3"} if text.model_type == "deepseek_v32" else {}
    return {
        **groups,
        **preset,
        "enabled": True,
        "autoep_size": size,
        "use_grouped_mm": grouped,
        "moe_layer_pattern": _LAYERS,
    }


class ExpertLayers:
    """A model's AutoEP layers. If there are none, all methods return their input unchanged."""

    def __init__(self, model: nn.Module, *, expected: int) -> None:
        """`expected` is the number of MoE layers in the model, or 0 without expert parallelism.
        Raises RuntimeError if AutoEP replaced a different number of layers."""
        self._layers = internals.expert_layers(model) if expected else {}
        if len(self._layers) != expected:
            raise RuntimeError(
                f"DeepSpeed AutoEP replaced {len(self._layers)} of {expected} MoE layers of "
                f"{type(model).__name__}. Set trainer.expert_parallel to 1"
            )

    @property
    def spread(self) -> bool:
        """True if the experts are distributed over ranks."""
        return bool(self._layers)

    def original(self, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a module's own tensors, unsharded and with the names they had before AutoEP. This
        gathers experts from all ranks, so every rank must call it for the same modules in the same
        order."""
        prefix, layer = self._find(next(iter(part)))
        if layer is None:
            return dict(part)
        names = internals.original_names(layer)
        if next(iter(part)).startswith(f"{prefix}.experts."):
            # w1, w3 [E/P, F, H] and w2 [E/P, H, F] of this rank → fused tensors of all E.
            group = internals.layer_group(layer)
            w1, w2, w3 = internals.WEIGHTS
            gate, down, up = (_gather(part[f"{prefix}.experts.{w}"], group) for w in (w1, w2, w3))
            return {
                f"{prefix}.{names[f'experts.{w1}']}": torch.cat([gate, up], dim=1),
                f"{prefix}.{names[f'experts.{w2}']}": down,
            }
        return {_renamed(name, prefix, names): tensor for name, tensor in part.items()}

    def runs(self, name: str, shape: Sequence[int]) -> list[ElementRun]:
        """Map a parameter's elements on this rank to their positions in the model before AutoEP.
        `shape` is the parameter's shape on this rank."""
        count = math.prod(shape)
        prefix, layer = self._find(name)
        if layer is None:
            return [ElementRun(0, count, name, 0)]
        names, local = internals.original_names(layer), name.removeprefix(f"{prefix}.")
        if not local.startswith("experts."):
            return [ElementRun(0, count, _renamed(name, prefix, names), 0)]
        first = dist.get_rank(internals.layer_group(layer)) * shape[0]  # this rank's first expert
        gate, down, _ = (f"experts.{w}" for w in internals.WEIGHTS)
        whole, each = f"{prefix}.{names[local]}", count // shape[0]
        if local == down:
            return [ElementRun(0, count, whole, first * each)]
        row = 0 if local == gate else 1  # an expert's gate projection precedes its up projection
        return [
            ElementRun(e * each, each, whole, (2 * (first + e) + row) * each)
            for e in range(shape[0])
        ]

    def _find(self, name: str) -> tuple[str, Any]:
        found = (each for each in self._layers.items() if name.startswith(f"{each[0]}."))
        return next(found, ("", None))


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Clip the gradients in place to a global norm of `limit`, and return the norm before clipping.
    The ranks in an expert group hold different experts, so their squared norms are summed over the
    group. Used only without ZeRO, because otherwise DeepSpeed does the clipping."""
    parameters = [p for p in parameters if p.grad is not None]
    shared, experts = internals.split_experts(parameters)
    norm = get_total_norm([p.grad for p in shared if p.grad is not None])
    if experts:
        square = get_total_norm([p.grad for p in experts if p.grad is not None]) ** 2
        dist.all_reduce(square, group=internals.expert_group(experts[0]))
        norm = (norm**2 + square).sqrt()
    clip_grads_with_norm_(parameters, limit, norm)
    return float(norm)


def by_expert_group(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Return parameter groups for AdamW. The experts get their own group, which ZeRO reduces
    separately."""
    shared, experts = internals.split_experts(parameters)
    groups: list[dict[str, Any]] = [{"params": shared}] if shared else []
    if experts:
        groups.append(
            {"params": experts, "moe": True, "name": internals.expert_group_name(experts[0])}
        )
    return groups


def _renamed(name: str, prefix: str, names: Mapping[str, str]) -> str:
    for autoep, original in names.items():
        if name.startswith(start := f"{prefix}.{autoep}."):
            return f"{prefix}.{original}.{name.removeprefix(start)}"
    return name


def _gather(share: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather the experts from all ranks, in rank order: [E/P, …] → [E, …]."""
    share = share.detach().contiguous()
    whole = share.new_empty(len(share) * dist.get_world_size(group), *share.shape[1:])
    dist.all_gather_into_tensor(whole, share, group=group)
    return whole
