"""Live and random routes of tiny models."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.model.routing.replay import record_routes
from keel.model.routing.routers import router_modules
from tests.model.families import VOCAB

TOKENS = torch.arange(10).reshape(2, 5) * 7 % VOCAB
N, K, E = TOKENS.numel(), 2, 8


def logits(model: PreTrainedModel) -> Tensor:
    return model(TOKENS, use_cache=False).logits


def live_routes(model: PreTrainedModel) -> Tensor:
    with torch.no_grad(), record_routes(model) as recording:
        logits(model)
    return recording.routes()


def other_routes(model: PreTrainedModel, seed: int = 0) -> Tensor:
    """Draw random routes with distinct experts."""
    generator = torch.Generator().manual_seed(seed)
    layers = len(router_modules(model))
    return torch.rand(N, layers, E, generator=generator).argsort(-1)[..., :K].to(torch.int16)
