"""Private APIs of transformers (5.17 to 5.19) and peft (0.21). Only this file uses them."""

import re
from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_NOISE = re.compile(r"drop|jitter")
_DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout)


def float32_names(model: PreTrainedModel) -> list[str]:
    """Return the names of modules and parameters that the model keeps in float32."""
    return sorted(model._keep_in_fp32_modules_strict or ())


def unused_tensor_patterns(kind: type[PreTrainedModel]) -> list[str]:
    """Return patterns for checkpoint tensors that the model does not use."""
    return sorted(kind._keys_to_ignore_on_load_unexpected or ())


def apply_gate(experts: Any, packed: Tensor) -> Tensor | None:
    """Apply the activation to packed gate and up projections, [N, 2·I] → [N, I]. Returns None if
    the activation is unknown."""
    apply = getattr(experts, "_apply_gate", None)
    return None if apply is None else apply(packed)


def is_expert_parallel(experts: Any) -> bool:
    """Return True if transformers has distributed these experts across ranks."""
    return getattr(experts, "_is_expert_parallel", False)


def switch_adapter(layer: Any, *, on: bool) -> None:
    """Turn a layer's adapter on or off. Unlike peft's `enable_adapters`, this leaves
    `requires_grad` unchanged."""
    layer._disable_adapters = not on


def change_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Change the class of `module` to its subclass `kind`. The module keeps its weights and hooks,
    and torch.compile sees the same forward function for all such modules."""
    module.__class__ = kind


def override_methods(module: nn.Module, methods: type) -> None:
    """Override methods of `module` with those of a mixin class (see `change_class`)."""
    change_class(module, _overridden(type(module), methods))


@cache  # one class for all layers, so that they share compiled code
def _overridden(kind: type[nn.Module], methods: type) -> type[nn.Module]:
    return type(kind.__name__, (methods, kind), {"__module__": kind.__module__})


def disable_dropout(model: nn.Module) -> None:
    """Turn off dropout, so that the model is deterministic even in train mode, as transformers'
    activation recomputation requires. `model.config` is left unchanged, because it is exported."""
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and _NOISE.search(name):
                setattr(module, name, 0.0)


def fix_long_rope(model: nn.Module, context: int) -> None:
    """Make LongRoPE (Phi-3.5, Phi-4-mini) use the same frequencies as an engine with a context
    of `context` tokens. vLLM chooses between short and long frequencies based on
    `max_model_len`, whereas transformers uses the highest position in each forward pass, which
    depends on packing."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer in [layer for layer, kind in by_layer.items() if kind == "longrope"]:
            options = {} if layer is None else {"layer_type": layer}
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
                module.config, seq_len=context, **options
            )
            current = getattr(module, "inv_freq" if layer is None else f"{layer}_inv_freq")
            current.copy_(frequencies)
            # transformers does not update a type of this name.
            if layer is None:
                module.rope_type = "fixed"  # type: ignore[assignment]
            else:
                kinds[layer] = "fixed"
