"""Definition of the support head with full logits."""

from __future__ import annotations

import torch
from torch import Tensor

from keel.model.head.support import HeadSpec
from keel.rl.types import SamplingMasks


def dense(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept: SamplingMasks,
    temperature: float = 1.0,
    spec: HeadSpec | None = None,
) -> tuple[Tensor, Tensor]:
    spec = spec or HeadSpec()
    logits = hidden.double() @ weight.double().t()
    if spec.bias is not None:
        logits = logits + spec.bias.double()
    logits = logits * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    mask = torch.zeros_like(logits, dtype=torch.bool)
    for row in range(len(targets)):
        span = torch.as_tensor(kept[row], dtype=torch.long)
        mask[row, span if len(span) else slice(None)] = True
    logp = (logits / temperature).masked_fill(~mask, -torch.inf).log_softmax(-1)
    entropy = -torch.where(mask, logp.exp() * logp, 0.0).sum(-1)
    return logp.gather(1, targets[:, None])[:, 0], entropy


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)
