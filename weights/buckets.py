"""Packs named tensors into buckets for a weight update. A bucket is one flat buffer with a table of
the tensors in it. Buckets make it possible to send thousands of tensors in a few large transfers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64
"""Each tensor in a bucket starts at a multiple of this many bytes, so that it can be used without
copying."""


class TensorEntry(NamedTuple):
    """Describes one tensor in a bucket. It is a tuple because a large update has tens of thousands
    of entries."""

    name: str
    """The tensor's name in the checkpoint. Each expert's tensors have their own names."""
    dtype: str
    """The name of the torch dtype, for example `bfloat16`."""
    shape: tuple[int, ...]
    offset: int
    """Byte offset of the tensor in the bucket."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ChannelData:
    """Tells the engine that the bytes follow through its `keel.weights.channel.Channel`."""

    size: int


@dataclass(frozen=True, slots=True)
class SharedData:
    """Refers to bytes in the memory of a GPU shared by the sender and the receiver (CUDA IPC)."""

    handle: tuple[Any, ...]
    """Arguments for PyTorch's `rebuild_cuda_tensor`."""
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A bucket as sent to an engine."""

    entries: tuple[TensorEntry, ...]
    data: NDArray[np.uint8] | ChannelData | SharedData
    """The bytes in host memory, or a description of where to find them."""


FlatBucket = tuple[tuple[TensorEntry, ...], Tensor]
"""The table of tensors, and their bytes as one flat tensor on the device of the packed tensors."""


def pack_flat(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[FlatBucket]:
    """Pack named tensors into buckets and yield the buckets. All tensors must be on the same
    device. A bucket has at most `bucket_bytes`, plus padding after the last tensor, unless a single
    tensor is larger. A bucket and its original tensors are in memory together until the next bucket
    is begun."""
    entries: list[TensorEntry] = []
    parts: list[Tensor] = []
    size = 0
    for name, tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if entries and size + flat.numel() > bucket_bytes:
            yield tuple(entries), torch.cat(parts)
            entries, parts, size = [], [], 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), offset=size))
        padding = -flat.numel() % ALIGNMENT
        parts += [flat, flat.new_zeros(padding)] if padding else [flat]
        size += flat.numel() + padding
    if entries:
        yield tuple(entries), torch.cat(parts)


def in_host_memory(buckets: Iterable[FlatBucket]) -> Iterator[Bucket]:
    """Copy buckets to host memory so that they can be put into Ray's object store."""
    for entries, flat in buckets:
        yield Bucket(entries=entries, data=flat.cpu().numpy())


def host_bytes(bucket: Bucket) -> Tensor:
    """Return the bytes of a bucket in host memory. Read-only bytes are copied first."""
    assert isinstance(bucket.data, np.ndarray)
    return torch.from_numpy(bucket.data if bucket.data.flags.writeable else bucket.data.copy())


def unpack_flat(entries: Iterable[TensorEntry], flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each entry in a bucket. The tensors are views of `flat`."""
    for entry in entries:
        dtype = getattr(torch, entry.dtype)
        part = flat[entry.offset : entry.offset + entry.numel * dtype.itemsize]
        yield entry.name, (part.view(dtype) if entry.numel else part.to(dtype)).view(entry.shape)


class Checksum:
    """A checksum over all buckets of an update. The sender and the engine both compute it. It
    depends on the order of the buckets."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def add(self, flat: Tensor) -> None:
        """Add a bucket to the checksum, without waiting for the bucket's device."""
        self._sums.append(flat.view(torch.int64).sum())

    def value(self) -> int:
        total = 0
        for each in torch.stack(self._sums).tolist() if self._sums else ():
            total = (total * 31 + each) % 2**61
        return total
