"""Weights on their way from the trainer to the engines: named tensors in flat buckets.

A bucket is one flat buffer of bytes with a table of contents, so that a model of thousands of
tensors travels in a few large transfers instead of one remote call per parameter. The bytes are in
host memory (Ray's object store carries them), or stay on the sender's device and go straight to the
engine.
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
    """A tuple, because a large update sends tens of thousands of them."""

    name: str
    """Name in the model's checkpoint format (per-expert names for experts)."""
    dtype: str
    """Name of the torch dtype, such as `bfloat16`."""
    shape: tuple[int, ...]
    offset: int
    """Where the tensor starts in the bucket, in bytes."""

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that come over the engine's `keel.weights.channel.Channel`."""

    size: int


@dataclass(frozen=True, slots=True)
class Shared:
    """Bytes in the memory of a GPU that sender and receiver both use (CUDA IPC)."""

    handle: tuple[Any, ...]
    """Arguments of PyTorch's `rebuild_cuda_tensor`."""
    size: int
    """Bytes from its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """As an engine is sent it."""

    entries: tuple[TensorEntry, ...]
    data: NDArray[np.uint8] | Sent | Shared
    """The bytes, or how to get them."""


FlatBucket = tuple[tuple[TensorEntry, ...], Tensor]
"""A bucket on the device of its tensors: table of contents, and bytes as one flat tensor."""


def pack_flat(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[FlatBucket]:
    """Group named tensors, all on one device, into buckets of at most `bucket_bytes` bytes there (a
    larger tensor has its own).

    Holds no more than one bucket in memory beyond what `tensors` yields.
    """
    entries: list[TensorEntry] = []
    parts: list[Tensor] = []
    size = 0
    for name, tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if entries and size + flat.numel() > bucket_bytes:
            yield tuple(entries), torch.cat(parts)
            entries, parts, size = [], [], 0
        entries.append(
            TensorEntry(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                offset=size,
            )
        )
        rest = -flat.numel() % ALIGNMENT
        parts += [flat, flat.new_zeros(rest)] if rest else [flat]
        size += flat.numel() + rest
    if entries:
        yield tuple(entries), torch.cat(parts)


def in_host_memory(buckets: Iterable[FlatBucket]) -> Iterator[Bucket]:
    """As Ray's object store carries them."""
    for entries, flat in buckets:
        yield Bucket(entries=entries, data=flat.cpu().numpy())


def host_bytes(bucket: Bucket) -> Tensor:
    """The bytes of a bucket in host memory (copied if read-only)."""
    assert isinstance(bucket.data, np.ndarray)
    return torch.from_numpy(bucket.data if bucket.data.flags.writeable else bucket.data.copy())


def unpack_flat(entries: Iterable[TensorEntry], flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a bucket, as views of its bytes."""
    for entry in entries:
        dtype = getattr(torch, entry.dtype)
        part = flat[entry.offset : entry.offset + entry.numel * dtype.itemsize]
        yield entry.name, (part.view(dtype) if entry.numel else part.to(dtype)).view(entry.shape)


class Checksum:
    """Of an update's buckets, in their order. Equal on both ends, or bytes were lost."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def add(self, flat: Tensor) -> None:
        """Stays on the device of `flat`: nothing is waited for."""
        self._sums.append(flat.view(torch.int64).sum())

    def value(self) -> int:
        total = 0
        for each in torch.stack(self._sums).tolist() if self._sums else ():
            total = (total * 31 + each) % 2**61
        return total
