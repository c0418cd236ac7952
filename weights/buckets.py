"""Named tensors packed into flat buckets.

A bucket is one flat buffer with a table of contents, so that thousands of tensors travel in a few
large transfers.
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
"""Bytes; every tensor starts at a multiple, so that it can be viewed in place."""


class TensorEntry(NamedTuple):
    """A tensor's place in a bucket. A tuple, because a large update has tens of thousands."""

    name: str
    """Checkpoint name (per-expert names for experts)."""
    dtype: str
    """Name of the torch dtype, such as `bfloat16`."""
    shape: tuple[int, ...]
    offset: int
    """In bytes."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ChannelData:
    """Announces bytes that follow through the engine's `keel.weights.channel.Channel`."""

    size: int


@dataclass(frozen=True, slots=True)
class SharedData:
    """Points to bytes on a GPU that sender and receiver share (CUDA IPC)."""

    handle: tuple[Any, ...]
    """Arguments of PyTorch's `rebuild_cuda_tensor`."""
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A bucket on its way to an engine."""

    entries: tuple[TensorEntry, ...]
    data: NDArray[np.uint8] | ChannelData | SharedData
    """The bytes in host memory, or how to get them."""


FlatBucket = tuple[tuple[TensorEntry, ...], Tensor]
"""Table of contents, and bytes as one flat tensor on the device of the packed tensors."""


def pack_flat(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[FlatBucket]:
    """Pack named tensors of one device into buckets of at most `bucket_bytes`, or of one larger
    tensor. Holds one bucket beyond what `tensors` yields."""
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
    """Copy buckets to host memory, for Ray's object store."""
    for entries, flat in buckets:
        yield Bucket(entries=entries, data=flat.cpu().numpy())


def host_bytes(bucket: Bucket) -> Tensor:
    """The bytes of a bucket in host memory, copied if read-only."""
    assert isinstance(bucket.data, np.ndarray)
    return torch.from_numpy(bucket.data if bucket.data.flags.writeable else bucket.data.copy())


def unpack_flat(entries: Iterable[TensorEntry], flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a bucket, as views of its bytes."""
    for entry in entries:
        dtype = getattr(torch, entry.dtype)
        part = flat[entry.offset : entry.offset + entry.numel * dtype.itemsize]
        yield entry.name, (part.view(dtype) if entry.numel else part.to(dtype)).view(entry.shape)


class Checksum:
    """Order-dependent checksum of an update's buckets, computed at both ends."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def add(self, flat: Tensor) -> None:
        """Add a bucket without synchronizing its device."""
        self._sums.append(flat.view(torch.int64).sum())

    def value(self) -> int:
        total = 0
        for each in torch.stack(self._sums).tolist() if self._sums else ():
            total = (total * 31 + each) % 2**61
        return total
