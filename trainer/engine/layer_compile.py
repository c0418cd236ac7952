"""Compiles the decoder layers with torch.compile."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from keel.model.routing.routers import router_modules
from keel.model.torch_internals import specialise_and_recompute
from keel.model.trainable import decoder_layers

BACKEND = "inductor"
"""The backend for torch.compile. On a CPU it needs a C++ compiler, and compiling takes minutes."""


def compile_layers(model: PreTrainedModel) -> None:
    """Make each decoder layer compile when it is first called. The graph works for any number of
    tokens.

    A whole layer becomes one graph. With several graphs, launching them would take longer than the
    GPU needs for a small micro-batch. MoE blocks are not compiled, because their shapes depend on
    the routing and Keep Routing hooks into them. Attention is not compiled either, unless it uses
    flash attention.
    """
    routers = set(router_modules(model))
    for block in model.modules():
        if routers & set(block.children()):
            block.forward = torch.compiler.disable(block.forward)
    specialise_and_recompute()
    for layer in decoder_layers(model):
        layer.compile(backend=BACKEND, dynamic=True)
