"""Float32 tensors in a safetensors file, written piece by piece and read by the slice.

`safetensors` wants all tensors of a file in host memory at once. Here one block is there at a time,
whatever a GPU holds; reading is left to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

BLOCK = 2**24
"""Elements that are in host memory at a time."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Flat float32 tensors, wherever they are. Raises `OSError` naming the file."""
    header: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.dim() != 1:
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}, not flat float32")
        size = 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": [len(tensor)], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    most = max((len(tensor) for tensor in tensors.values()), default=0)
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    staging = torch.empty(min(BLOCK, most), pin_memory=on_gpu)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                for block in tensor.detach().split(BLOCK):
                    # Never `numpy` of the tensor itself: its storage could not be emptied again.
                    staged = staging[: len(block)].copy_(block)
                    file.write(staged.numpy().data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class TensorFile:
    """One that `write_tensors` has written, or any other of flat tensors."""

    def __init__(self, path: Path) -> None:
        """Raises `ValueError` naming the file if it is none."""
        try:
            self._file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: cannot be read ({error})") from error
        self.names = frozenset(self._file.keys())

    def read(self, name: str, start: int, count: int) -> Tensor:
        """[count] from element `start`."""
        return self._file.get_slice(name)[start : start + count]
