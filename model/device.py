"""Copies to a GPU that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor` of host memory on `device`. A copy from pageable memory would wait until the GPU has
    done all it was given before."""
    device = torch.device(device)
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
