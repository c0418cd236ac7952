"""Nothing random in the network: dropout and router jitter of a family's config stay out of RL."""

from __future__ import annotations

import re

from torch import nn

_NOISE = re.compile(r"drop|jitter")
_DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout)


def switch_off_noise(model: nn.Module) -> None:
    """Have `model` compute the same in train mode as in eval mode.

    The rollout engine samples without dropout, so a trainer with it would see ratios other than 1
    on policy, and gradients of another policy. Train mode itself has to stay: transformers
    recomputes activations in no other. `model.config`, which exports write, is left as it is.
    """
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and _NOISE.search(name):
                setattr(module, name, 0.0)
