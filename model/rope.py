"""Fixes rotary embeddings that depend on the context length."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def fix_long_rope(model: nn.Module, context: int) -> None:
    """Make LongRoPE (Phi-3.5, Phi-4-mini) use the same frequencies as an engine with `context`
    tokens.

    LongRoPE has different frequencies for short and long contexts. vLLM chooses them by
    `max_model_len`, but transformers by the highest position in each forward pass, so probabilities
    would depend on packing.
    """
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
