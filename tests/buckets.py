"""Buckets in host memory, for tests that need weights to send or to read."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from keel.weights.buckets import Bucket, host_bytes, in_host_memory, pack_flat, unpack_flat


def pack_buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    return in_host_memory(pack_flat(tensors, bucket_bytes))


def unpack_bucket(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    return unpack_flat(bucket.entries, host_bytes(bucket))
