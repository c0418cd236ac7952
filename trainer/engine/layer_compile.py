"""torch.compile of the decoder layers: norms, projections, rotary embedding and residuals fuse."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from keel.model.routing.replay import router_modules
from keel.model.torch_internals import specialise_and_recompute

BACKEND = "inductor"
"""torch.compile's; on a CPU it needs a C++ compiler, and minutes."""


def compile_layers(model: PreTrainedModel) -> None:
    """Have each decoder layer compiled at its first call, in place.

    A layer is one graph: with several, the host takes longer to call them than a GPU needs for a
    micro-batch of a few thousand tokens. But a mixture-of-experts block stays as it is inside its
    layer: which experts run, and on how many tokens, is known only when it runs, and Keep Routing's
    hooks act there. So does attention without flash attention (`keel.model.attention`). Numbers of
    tokens do not recompile.
    """
    routers = set(router_modules(model))
    for block in model.modules():
        if routers & set(block.children()):
            block.forward = torch.compiler.disable(block.forward)
    specialise_and_recompute()
    layers: Any = model.get_decoder().layers
    for layer in layers:
        layer.compile(backend=BACKEND, dynamic=True)
