"""Turns off dropout and router jitter in a model."""

from __future__ import annotations

import re

from torch import nn

_NOISE = re.compile(r"drop|jitter")
_DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout)


def disable_dropout(model: nn.Module) -> None:
    """Make `model` deterministic in train mode.

    The rollout engine samples without dropout. If the trainer used dropout, its probability ratios
    would differ from 1 even on policy. Train mode is still needed, because transformers recomputes
    activations only in it. `model.config` is not changed, since it is exported.
    """
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and _NOISE.search(name):
                setattr(module, name, 0.0)
