"""Buckets of plain tensors, for tests that need weights to send or to read."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keel.weights.channel import (
    ALIGNMENT,
    Bucket,
    FlatBucket,
    HostData,
    TensorEntry,
    unpack_flat,
)


def pack_flat(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[FlatBucket]:
    """Pack named tensors into buckets as `keel.weights.sender.BucketPacker` packs a model's."""
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


def pack_buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    for entries, flat in pack_flat(tensors, bucket_bytes):
        yield Bucket(entries=entries, data=HostData(flat.cpu().numpy()))


def unpack_bucket(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    return unpack_flat(bucket.entries, torch.from_numpy(data_of(bucket).copy()))


def data_of(bucket: Bucket) -> NDArray[np.uint8]:
    assert isinstance(bucket.data, HostData)
    return bucket.data.array
