"""All that Keel uses of transformers without a public name, in 5.17 to 5.19. No other file names a
private attribute of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel


def check_transformers(model: PreTrainedModel) -> str:
    """One line if `model` runs slower for what transformers has changed, else empty.

    Raises `RuntimeError` if it no longer says which weights stay in float32: they would reach the
    engines rounded.
    """
    if not hasattr(PreTrainedModel, "_keep_in_fp32_modules_strict"):
        raise RuntimeError(
            f"transformers {transformers.__version__} has no PreTrainedModel."
            "_keep_in_fp32_modules_strict, which 5.17 to 5.19 have and Keel needs: install one of "
            "those"
        )
    experts = [module for module in model.modules() if hasattr(module, "gate_up_proj")]
    if any(not hasattr(each, "_apply_gate") for each in experts):
        return (
            f"transformers {transformers.__version__} is not as 5.17 to 5.19 were: "
            f"{type(experts[0]).__name__} has no _apply_gate. Its own experts run, which are slower"
        )
    return ""


def always_float32(model: PreTrainedModel) -> list[str]:
    """Names of modules and parameters that the family keeps in float32 beside weights of any
    dtype."""
    return sorted(model._keep_in_fp32_modules_strict or ())


def loaded_as(model: PreTrainedModel, names: Iterable[str]) -> Mapping[str, tuple[str, bool]]:
    """Name of a checkpoint's tensor → the name in the state dict that `from_pretrained` makes of
    it, and whether it becomes that one as it is, and no part of it. Empty for a family whose
    tensors are cut up while they are loaded, and with a release that has other names for this."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
        from transformers.core_model_loading import (  # noqa: PLC0415
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:
        return {}
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    if any(len(each.target_patterns) > 1 for each in converters):
        return {}
    prefix, state = model.base_model_prefix, model.state_dict()
    found: dict[str, tuple[str, bool]] = {}
    for name in sorted(names, key=dot_natural_key):  # some renamings wait for others
        target, source = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, source = name, None
        found[name] = target, source is None
    return found


def left_out(
    model: PreTrainedModel | type[PreTrainedModel],
) -> tuple[list[str], list[str]]:
    """Patterns of tensors that a checkpoint may lack, and of those that it may have for nothing."""
    lacking = model._keys_to_ignore_on_load_missing or ()
    further = model._keys_to_ignore_on_load_unexpected or ()
    return sorted(lacking), sorted(further)


def gated(experts: Any, packed: Tensor) -> Tensor | None:
    """What these experts make of gate and up, [N, 2·I] → [N, I]; None if they do not say."""
    apply = getattr(experts, "_apply_gate", None)
    return None if apply is None else apply(packed)


def spread_by_transformers(experts: Any) -> bool:
    """Whether transformers itself has spread these experts over ranks."""
    return getattr(experts, "_is_expert_parallel", False)


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Make `module` one of `kind`, a subclass of its own class: the same weights and hooks, another
    forward, which torch.compile sees as one function for all of them."""
    module.__class__ = kind


def override(module: nn.Module, methods: type) -> None:
    """Have the methods of this class stand before those of `module`'s own (`become`)."""
    become(module, _overridden(type(module), methods))


@cache  # one class for all layers, or each would be compiled anew
def _overridden(kind: type[nn.Module], methods: type) -> type[nn.Module]:
    return type(kind.__name__, (methods, kind), {"__module__": kind.__module__})
