"""Copies tensors to a GPU without blocking."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy `tensor` from host memory to `device` without waiting for queued GPU work."""
    device = torch.device(device)
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
