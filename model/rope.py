"""Rotary embeddings that depend on lengths: one choice for a run, as the engine has made it."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def fix_long_rope(model: nn.Module, context: int) -> None:
    """Give LongRoPE (Phi-3.5, Phi-4-mini) the frequencies that an engine of `context` tokens has.

    It has two sets, for contexts up to the length it was pretrained on and beyond. vLLM decides by
    its `max_model_len`, for all tokens alike; transformers decides in each forward pass by the
    highest position in it, so a trajectory's probabilities would depend on those it is packed with.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer in [layer for layer, kind in by_layer.items() if kind == "longrope"]:
            options = {} if layer is None else {"layer_type": layer}
            wanted, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, seq_len=context, **options)
            now = getattr(module, "inv_freq" if layer is None else f"{layer}_inv_freq")
            now.copy_(wanted)
            # Under this name transformers leaves them as they are.
            if layer is None:
                module.rope_type = "fixed"  # type: ignore[assignment]
            else:
                kinds[layer] = "fixed"
