"""Pack named tensors into buckets for a weight update, and check that an update is complete. A
bucket is one flat buffer with a table of its tensors, so that thousands of tensors need only a few
large transfers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from keel.model.transformers_internals import unused_tensor_patterns

ALIGNMENT = 64  # alignment of tensors in bytes, so that they can be used without copying


class TensorEntry(NamedTuple):
    """A tensor in a bucket. It's a tuple for speed, because a large update has tens of thousands of
    tensors."""

    name: str  # Name of the tensor in the checkpoint. Each expert's tensors have their own names.
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ChannelData:
    """Tells the engine that a bucket's bytes will follow on its `Channel`."""

    size: int


@dataclass(frozen=True, slots=True)
class SharedData:
    """Location of a bucket's bytes on a GPU shared by sender and receiver (CUDA IPC)."""

    handle: tuple[Any, ...]
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors packed into one flat buffer, as sent to an engine."""

    entries: tuple[TensorEntry, ...]
    data: NDArray[np.uint8] | ChannelData | SharedData
    """The bytes in host memory, or where to find them."""


FlatBucket = tuple[tuple[TensorEntry, ...], Tensor]
"""A bucket on the device of its tensors: the tensor table and the bytes as one flat tensor."""


def in_host_memory(buckets: Iterable[FlatBucket]) -> Iterator[Bucket]:
    """Copy buckets to host memory, for Ray's object store."""
    for entries, flat in buckets:
        yield Bucket(entries=entries, data=flat.cpu().numpy())


def host_bytes(bucket: Bucket) -> Tensor:
    """Return a bucket's bytes as a tensor in host memory. Read-only bytes are copied first."""
    assert isinstance(bucket.data, np.ndarray)
    return torch.from_numpy(bucket.data if bucket.data.flags.writeable else bucket.data.copy())


def unpack_flat(entries: Iterable[TensorEntry], flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each bucket entry. The tensors are views of `flat`."""
    for entry in entries:
        dtype = getattr(torch, entry.dtype)
        part = flat[entry.offset : entry.offset + entry.numel * dtype.itemsize]
        yield entry.name, (part.view(dtype) if entry.numel else part.to(dtype)).view(entry.shape)


class Checksum:
    """A checksum over all buckets of an update, in order. Both sender and receiver compute it."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def add(self, flat: Tensor) -> None:
        self._sums.append(flat.view(torch.int64).sum())

    def value(self) -> int:
        total = 0
        for each in torch.stack(self._sums).tolist() if self._sums else ():
            total = (total * 31 + each) % 2**61
        return total


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_COMPUTED = re.compile(
    r"\brotary(_pos)?_emb\.(inv_freq|cos_cached|sin_cached)$|\.weight_scale_inv$"
)
"""Tensors in old checkpoints that the engine and the trainer compute themselves."""


class TensorChecklist:
    """Checks that all tensors of an update have arrived, because vLLM does not notice every missing
    tensor."""

    def __init__(
        self,
        names: Iterable[str],
        *,
        layers: int,
        tied: bool,
        decoder: str = "",
        unread: Iterable[str] = (),
    ) -> None:
        """Create a checklist from the tensor names in the checkpoint.

        `layers` is the number of layers, not counting the multi-token prediction layers. Those come
        last, and neither the engine nor the trainer loads them. If `tied` is set, the output
        embedding is the input embedding and may be missing. `decoder` is the decoder's prefix in
        tensor names; names without it are accepted too. `unread` lists patterns for tensors that
        the trainer doesn't load.
        """
        self._prefix = f"{decoder}."
        self._required: set[str] = set()
        self._optional = {"lm_head.weight"} if tied else set[str]()
        for name in map(self._plain, names):
            layer = _LAYER.search(name)
            # Patterns that name whole layers mean those behind the last one, hence without numbers.
            if any(re.search(pattern, _LAYER.sub(".", name)) for pattern in unread):
                self._optional.add(name)
            elif not _COMPUTED.search(name) and (layer is None or int(layer[1]) < layers):
                self._required.add(name)
        self._required -= self._optional
        self._missing: set[str] = set()

    @staticmethod
    def of_checkpoint(path: str, text: PreTrainedConfig) -> TensorChecklist:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), PreTrainedModel)
        return TensorChecklist(
            checkpoint_names(path),
            layers=text.num_hidden_layers,
            tied=bool(getattr(text, "tie_word_embeddings", False)),
            decoder=kind.base_model_prefix,
            unread=unused_tensor_patterns(kind),
        )

    def begin(self) -> None:
        self._missing = set(self._required)

    def arrived(self, bucket: Bucket) -> None:
        for entry in bucket.entries:
            name = self._plain(entry.name)
            if name not in self._required and name not in self._optional:
                raise ValueError(
                    f"weight update: the engine's checkpoint has no tensor {entry.name!r}; publish "
                    "the names that save_pretrained writes (one tensor for each expert)"
                )
            self._missing.discard(name)

    def finish(self) -> None:
        if self._missing:
            first = ", ".join(sorted(self._missing)[:3])
            raise ValueError(
                f"weight update: {len(self._missing)} of {len(self._required)} tensors did not "
                f"arrive, among them {first}; the engine would mix old and new weights"
            )

    def _plain(self, name: str) -> str:
        return name.removeprefix(self._prefix)


def checkpoint_names(path: str) -> list[str]:
    """Return the tensor names in a safetensors checkpoint. `path` is a folder or a hub name."""
    find = partial(cached_file, path, _raise_exceptions_for_missing_entries=False)
    if (index := find("model.safetensors.index.json")) is not None:
        return list(json.loads(Path(index).read_text())["weight_map"])
    if (single := find("model.safetensors")) is None:
        raise ValueError(
            f"model.path = {path!r}: has no safetensors checkpoint (model.safetensors)"
        )
    with safe_open(single, framework="pt") as tensors:
        return list(tensors.keys())
