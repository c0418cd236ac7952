"""All that Keel uses of transformers without a public name, in 5.17 to 5.19. No other file names a
private attribute of it."""

from __future__ import annotations

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
