"""Packs a model's checkpoint tensors into buckets for each weight update. Transformers takes about
50 µs of Python time to convert a tensor to its checkpoint name, and a mixture-of-experts model has
tens of thousands of tensors. The first update therefore records where each checkpoint tensor is
located in the model. Later updates copy large contiguous blocks of memory, such as all experts of a
layer at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from keel.model.load import Named, Whole, as_checkpoint, module_tensors, precision
from keel.weights.buckets import FlatBucket, TensorEntry, pack_flat


@dataclass(frozen=True, slots=True)
class _Run:
    """A range of elements that is contiguous both in a module's tensor and in a bucket."""

    source: str
    """The name of the module's tensor."""
    start: int
    """Index of the first element in the module's tensor."""
    count: int
    bucket: int
    at: int
    """Byte offset of the run in the bucket."""
    dtype: torch.dtype
    """Element type in the bucket."""


class BucketPacker:
    """Packs the weights of one model, whose modules and shapes must not change."""

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        bucket_bytes: int,
        *,
        whole: Whole | None = None,
    ) -> None:
        """Create a packer for `model`. `dtype` is the dtype used by the engines (see `precision`).
        `bucket_bytes` is explained in `pack_flat` and `whole` in `module_tensors`."""
        self._model, self._size, self._whole = model, bucket_bytes, whole
        self._in_engine_dtype = precision(model, dtype)
        self._tables: list[tuple[tuple[TensorEntry, ...], int]] = []
        """The tensor table of each bucket, and the size of the bucket in bytes."""
        self._runs: list[list[_Run]] = []
        """The runs of each module, in the order of the buckets."""
        self._computed: set[int] = set()
        """Modules whose checkpoint tensors have to be computed, because they are not simply parts
        of the module's tensors."""

    def buckets(self) -> Iterator[FlatBucket]:
        """Pack the current weights and yield the buckets. The first call needs as much memory as
        `pack_flat`. Later calls keep only one bucket and one module's tensors in memory at a time.
        """
        return self._replay() if self._tables else self._record()

    def _record(self) -> Iterator[FlatBucket]:
        origins: dict[str, tuple[int, str, int]] = {}
        computed: set[int] = set()
        modules = 0

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal modules
            for index, local in enumerate(module_tensors(self._model, whole=self._whole)):
                modules += 1
                named = self._named(local)
                places = {name: _origin(tensor, local) for name, tensor in named.items()}
                if None in places.values():
                    computed.add(index)
                    places = {name: (name, 0) for name in named}
                own_origins = {name: (index, *place) for name, place in places.items() if place}
                origins.update(own_origins)
                # Memory order lets neighbours form one run.
                for name in sorted(named, key=own_origins.__getitem__):
                    yield name, self._in_engine_dtype(name, named[name])

        tables: list[tuple[tuple[TensorEntry, ...], int]] = []
        for entries, flat in pack_flat(tensors(), self._size):
            tables.append((entries, flat.numel()))
            yield entries, flat
        runs: list[list[_Run]] = [[] for _ in range(modules)]
        for number, (entries, _) in enumerate(tables):
            for entry in entries:
                module, source, start = origins[entry.name]
                dtype = getattr(torch, entry.dtype)
                _append(runs[module], _Run(source, start, entry.numel, number, entry.offset, dtype))
        self._tables, self._runs, self._computed = tables, runs, computed

    def _named(self, local: Named) -> Named:
        try:
            with _WithoutCopies():
                return as_checkpoint(self._model, local)
        except RuntimeError:  # a conversion that needs a contiguous tensor
            return as_checkpoint(self._model, local)

    def _replay(self) -> Iterator[FlatBucket]:
        number, flat = -1, torch.empty(0)
        modules = module_tensors(self._model, whole=self._whole)
        for index, (local, runs) in enumerate(zip(modules, self._runs, strict=True)):
            sources = as_checkpoint(self._model, local) if index in self._computed else local
            for run in runs:
                if run.bucket != number:
                    if number >= 0:
                        yield self._tables[number][0], flat
                        flat = torch.empty(0)  # frees memory for the next one
                    number, device = run.bucket, sources[run.source].device
                    flat = torch.zeros(self._tables[number][1], dtype=torch.uint8, device=device)
                part = sources[run.source].reshape(-1)[run.start : run.start + run.count]
                if run.count:
                    end = run.at + run.count * run.dtype.itemsize
                    flat[run.at : end].view(run.dtype).copy_(part)
        if number >= 0:
            yield self._tables[number][0], flat


class _WithoutCopies(TorchFunctionMode):
    """Turns `contiguous` into a no-op. Transformers calls `contiguous` before it splits a tensor.
    Without this copy, the parts are views, which show where their elements come from."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _origin(tensor: Tensor, local: Mapping[str, Tensor]) -> tuple[str, int] | None:
    """Find the tensor in `local` that contains this tensor without gaps. Returns its name and the
    index of the first element in it, or None if there is no such tensor."""
    for name, whole in local.items():
        start, rest = divmod(tensor.data_ptr() - whole.data_ptr(), whole.itemsize)
        if (
            tensor.dtype == whole.dtype
            and tensor.is_contiguous()
            and whole.is_contiguous()
            and rest == 0
            and 0 <= start <= whole.numel() - tensor.numel()
        ):
            return name, start
    return None


def _append(runs: list[_Run], run: _Run) -> None:
    if runs:
        last = runs[-1]
        bytes_before = last.count * last.dtype.itemsize
        after = replace(last, start=last.start + last.count, at=last.at + bytes_before)
        if run == replace(after, count=run.count):
            runs[-1] = replace(last, count=last.count + run.count)
            return
    runs.append(run)
