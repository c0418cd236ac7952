"""Disables dropout and router jitter."""

from __future__ import annotations

import re

from torch import nn

_NOISE = re.compile(r"drop|jitter")
_DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout)


def disable_dropout(model: nn.Module) -> None:
    """Make `model` deterministic in train mode.

    The rollout engine samples without dropout; with it, the trainer's ratios would not be 1 on
    policy. Train mode is still needed, because transformers recomputes activations only in it. Does
    not change `model.config`, which is exported.
    """
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and _NOISE.search(name):
                setattr(module, name, 0.0)
