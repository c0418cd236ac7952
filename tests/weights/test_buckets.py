from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.weights.buckets import ALIGNMENT
from tests.buckets import pack_buckets, unpack_bucket

DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.uint8]


def random_tensors(shapes: list[list[int]], dtypes: list[torch.dtype]) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (f"tensor.{i}", torch.randint(0, 100, shape, generator=generator).to(dtype))
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 5), max_size=3), st.sampled_from(DTYPES)), max_size=12
    ),
    st.integers(1, 500),
)
def test_packing_round_trips(specs: list[tuple[list[int], torch.dtype]], bucket_bytes: int) -> None:
    tensors = random_tensors([shape for shape, _ in specs], [dtype for _, dtype in specs])
    buckets = list(pack_buckets(tensors, bucket_bytes))
    unpacked = [pair for bucket in buckets for pair in unpack_bucket(bucket)]
    assert [name for name, _ in unpacked] == [name for name, _ in tensors]
    for (_, packed), (_, original) in zip(unpacked, tensors, strict=True):
        assert packed.dtype == original.dtype
        assert torch.equal(packed, original)
    for bucket in buckets:
        assert all(entry.offset % ALIGNMENT == 0 for entry in bucket.entries)
        assert len(bucket.entries) == 1 or len(bucket.data) <= bucket_bytes + ALIGNMENT


def test_packing_is_lazy() -> None:
    drawn: list[int] = []

    def source():
        for i in range(10):
            drawn.append(i)
            yield str(i), torch.zeros(64, dtype=torch.uint8)

    next(iter(pack_buckets(source(), 128)))
    assert len(drawn) == 3


def test_strided_tensors_keep_their_values() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    (bucket,) = pack_buckets([("t", matrix.T), ("s", matrix[:, ::2])], 1 << 20)
    unpacked = dict(unpack_bucket(bucket))
    assert torch.equal(unpacked["t"], matrix.T)
    assert torch.equal(unpacked["s"], matrix[:, ::2])


@pytest.mark.parametrize("writeable", [True, False])
def test_read_only_bytes_are_copied(writeable: bool) -> None:
    (bucket,) = pack_buckets([("t", torch.zeros(4))], 1 << 20)
    assert isinstance(bucket.data, np.ndarray)
    if not writeable:
        bucket.data.flags.writeable = False
    dict(unpack_bucket(bucket))["t"].fill_(1.0)
    assert (bucket.data.view(np.float32)[:4] == (1.0 if writeable else 0.0)).all()
