"""Copy checkpoint tensors straight into the tensors that vLLM's kernels read.

vLLM's loader spends a fraction of a millisecond of Python time on each tensor, and a
mixture-of-experts model has tens of thousands. It puts every tensor in the same place in each
update. A `LoadTracer` therefore records the destinations during one update, and a `CopyPlan` then
repeats the copies with a few calls per layer.

The tracer follows each checkpoint tensor from its bucket into the tensor that vLLM builds for a
complete layer, and from there into the tensor that kernels and CUDA graphs use. It refuses to make
a plan if anything else happens to the weights: an operation that reads them and is not a view may
compute something that the copies would not update. At the end, the records are verified: every
loaded tensor is inverted bit by bit, rebuilt and compared. Without a plan, vLLM's loader carries
out every update. Offsets and strides count elements unless stated otherwise.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keel.weights.channel import TensorEntry

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by size in bytes, for copies that do not convert."""
_AFTER_LOADING = "process_weights_after_loading"
_ATEN = torch.ops.aten
_SHAPE_ONLY = (
    *(_ATEN.empty_like, _ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like),
    *(_ATEN.new_empty, _ATEN.new_empty_strided, _ATEN.new_zeros, _ATEN.new_ones, _ATEN.new_full),
)
"""Operations that depend only on a tensor's shape, dtype and device."""
_Dims = tuple[tuple[int, int, int], ...]
"""Length of each dimension, with its strides in the kernel's tensor and in the source."""
Layout = tuple[int, tuple[int, ...], tuple[int, ...]]  # storage offset, size and stride


@dataclass(frozen=True, slots=True)
class _CopyPiece:
    """A part of a checkpoint tensor and its destination in a kernel's tensor."""

    kernel: int
    at: int  # position in the kernel's storage
    source: int  # position in the checkpoint tensor or in a bucket
    dims: _Dims
    dtype: torch.dtype


_Placed = Mapping[str, tuple[TensorEntry, tuple[_CopyPiece, ...]]]
"""Pieces of each checkpoint tensor. A tensor that vLLM's loader ignores has none."""
_Copies = tuple[list[Tensor], list[Layout]]
"""Target tensors, and the layouts of the bucket parts to copy into them. A single call copies all
of them, so they must have the same dtypes, and either all or none may have gaps."""
_Program = list[tuple[torch.dtype, _Copies]]  # the copies for one bucket, by dtype of their source


class CopyPlan:
    """Copies all checkpoint tensors to their destinations in an engine worker."""

    def __init__(
        self, kernels: Sequence[Tensor], placed: _Placed, fills: Sequence[tuple[Tensor, float]] = ()
    ) -> None:
        """Create a copy plan. `fills` lists the parts of the kernels' tensors that never change,
        each with its value."""
        self.kernels, self.placed, self._fills = kernels, placed, fills
        self._programs: dict[str, tuple[tuple[TensorEntry, ...], _Program]] = {}
        """Table and copies of each known bucket, keyed by the name of its first tensor."""

    def begin(self) -> None:
        for target, value in self._fills:
            target.fill_(value)

    def load(self, entries: tuple[TensorEntry, ...], flat: Tensor) -> None:
        """Copy the tensors in a bucket to their destinations. Raises ValueError if a tensor was not
        part of the first update, or had a different dtype or shape in it."""
        if (flat.data_ptr() | int(flat.storage_offset())) % 8:
            flat = flat.clone()
        known, program = self._programs.get(entries[0].name, ((), []))
        if known != entries:
            pieces = [piece for entry in entries for piece in self._pieces(entry)]
            program = self._program(_merge_pieces(pieces))
            self._programs[entries[0].name] = entries, program
        for dtype, (targets, sources) in program:
            first = int(flat.storage_offset()) // dtype.itemsize
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                targets,
                [
                    _storage_view(flat, dtype, (first + at, size, stride))
                    for at, size, stride in sources
                ],
            )

    def _program(self, pieces: Iterable[_CopyPiece]) -> _Program:
        groups: dict[tuple[torch.dtype, torch.dtype, bool], _Copies] = {}
        for piece in pieces:
            kernel = self.kernels[piece.kernel]
            dtype = kernel.dtype
            if dtype == piece.dtype:
                piece, dtype = _with_widest_integers(piece)
            size, strides, source_strides = zip(*piece.dims, strict=True)
            dense = piece.dims[1:] == () and piece.dims[0][1:] == (1, 1)
            targets, sources = groups.setdefault((piece.dtype, dtype, dense), ([], []))
            targets.append(_storage_view(kernel, dtype, (piece.at, size, strides)))
            sources.append((piece.source, size, source_strides))
        return [(source_dtype, copies) for (source_dtype, _, _), copies in groups.items()]

    def _pieces(self, entry: TensorEntry) -> Iterator[_CopyPiece]:
        known, pieces = self.placed.get(entry.name, (None, ()))
        if known is None or known[1:3] != entry[1:3]:
            was = "absent" if known is None else f"{known.dtype} {list(known.shape)}"
            raise ValueError(
                f"weight update: {entry.name!r} is {entry.dtype} {list(entry.shape)} and was {was} "
                "in the first update; publish the same tensors each time"
            )
        for piece in pieces:
            yield replace(piece, source=piece.source + entry.offset // piece.dtype.itemsize)


def _storage_view(tensor: Tensor, dtype: torch.dtype, layout: Layout) -> Tensor:
    """Return part of a tensor's storage as a view with the given dtype."""
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    return view.set_(tensor.untyped_storage(), *layout)


def _simplify_dims(size: Sequence[int], at: Sequence[int], source: Sequence[int]) -> _Dims:
    """Sort the dimensions of a copy from outermost to innermost, drop those of length 1 and merge
    contiguous ones. Each source element still ends up in the same place."""
    parts = [part for part in zip(size, at, source, strict=True) if part[0] != 1]
    simple: list[tuple[int, int, int]] = []
    for n, inner_at, inner in sorted(parts, key=lambda part: part[1], reverse=True):
        if simple and simple[-1][1:] == (n * inner_at, n * inner):
            simple[-1] = simple[-1][0] * n, inner_at, inner
        else:
            simple.append((n, inner_at, inner))
    return tuple(simple) or ((1, 1, 1),)


def _merge_pieces(pieces: Iterable[_CopyPiece]) -> list[_CopyPiece]:
    """Merge evenly spaced pieces of the same shape, such as a layer's experts, into one piece with
    an extra dimension."""
    ordered = sorted(
        pieces, key=lambda piece: (piece.kernel, str(piece.dtype), piece.at, piece.source)
    )
    while True:
        joined: list[_CopyPiece] = []
        index = 0
        while index < len(ordered):
            first, end = ordered[index], index + 1
            step = _piece_interval(first, ordered[end]) if end < len(ordered) else None
            while (
                step
                and end < len(ordered)
                and _piece_interval(ordered[end - 1], ordered[end]) == step
            ):
                end += 1
            if step:
                parts = zip((end - index, *step), *first.dims, strict=True)
                first = replace(first, dims=_simplify_dims(*parts))
            joined.append(first)
            index = end
        if len(joined) == len(ordered):
            return joined
        ordered = joined


def _piece_interval(one: _CopyPiece, other: _CopyPiece) -> tuple[int, int] | None:
    at, source = other.at - one.at, other.source - one.source
    alike = replace(other, at=one.at, source=one.source) == one
    return (at, source) if alike and at > 0 and source >= 0 else None


def _with_widest_integers(piece: _CopyPiece) -> tuple[_CopyPiece, torch.dtype]:
    """Convert a piece to the widest integer type that fits its bytes. Returns the piece and the
    type."""
    item = piece.dtype.itemsize
    *outer, (n, *inner) = piece.dims
    strides = [stride for _, *both in outer for stride in both]
    lengths = [length * item for length in (piece.at, piece.source, n, *strides)]
    fits = inner == [1, 1]
    width = max(w for w in _INTEGERS if w == item or (fits and not any(x % w for x in lengths)))

    def wide(length: int) -> int:
        return length * item // width

    parts = piece.dims
    if width != item:
        parts = (*((m, wide(at), wide(source)) for m, at, source in outer), (wide(n), 1, 1))
    dtype = _INTEGERS[width]
    return _CopyPiece(piece.kernel, wide(piece.at), wide(piece.source), parts, dtype), dtype


@dataclass(slots=True)
class _Write:
    data: Tensor | None
    """The data that was written. None for a constant, and after the write has been verified."""
    name: str = ""  # checkpoint tensor that the data came from, or "" if it was a constant
    start: int = 0
    stride: tuple[int, ...] = ()  # position and stride of the data in the checkpoint tensor
    value: float = 0.0  # the constant


@dataclass(slots=True)
class _WrittenStorage:
    """The storage of a tensor, either a kernel's or an intermediate one, along with the weights
    written to it."""

    alive: StorageWeakRef  # prevents the storage's key from being reused
    dtype: torch.dtype
    name: str = "a loaded tensor"
    kernel: Tensor | None = None  # the kernel's tensor, or None for an intermediate storage
    writes: dict[Layout, _Write] = field(default_factory=dict[Layout, _Write])
    read_by: str = ""
    proven: bool = False


@dataclass(slots=True)
class _Bucket:
    alive: StorageWeakRef
    entries: tuple[TensorEntry, ...]
    start: int


class LoadTracer(TorchDispatchMode):
    """Records what vLLM's loader does during an update, in order to build a `CopyPlan`."""

    def __init__(self, model: nn.Module, deferred: Sequence[nn.Module] = ()) -> None:
        """Create a tracer. `deferred` lists the layers that process their weights again in every
        update. Their processing is not recorded."""
        super().__init__()
        self.refusal = ""  # the reason why no plan can be made, or "" as long as a plan is possible
        self._model, self._deferred, self._paused = model, deferred, False
        self._targets: dict[int, _WrittenStorage] = {}
        self._buckets: dict[int, _Bucket] = {}
        self._arrived: dict[str, TensorEntry] = {}
        self._addresses = _addresses(model)
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if tensor.is_meta:
                self.refuse(f"{name} was left unfinished by an earlier update")
                continue
            target = self._target(tensor)
            if target.kernel is None or target.kernel.numel() < tensor.numel():
                target.name, target.kernel = name, tensor.detach()

    def refuse(self, why: str) -> None:
        self.refusal = self.refusal or why

    @contextmanager
    def bucket(self, entries: tuple[TensorEntry, ...], flat: Tensor) -> Iterator[None]:
        alive = StorageWeakRef(flat.untyped_storage())
        self._buckets[_storage_key(flat)] = _Bucket(alive, entries, int(flat.storage_offset()))
        for entry in entries:
            if entry.name in self._arrived:
                self.refuse(f"{entry.name} came twice")
            self._arrived[entry.name] = entry
        with self.record_operations():
            yield
        # vLLM frees the sources of a complete layer.
        self._buckets = {k: each for k, each in self._buckets.items() if not each.alive.expired()}
        self._targets = {k: each for k, each in self._targets.items() if not each.alive.expired()}

    @contextmanager
    def record_operations(self) -> Iterator[None]:
        """Record all of the loader's operations inside this context, except those in the `deferred`
        layers."""
        if self.refusal:
            yield
            return
        for layer in self._deferred:
            layer.__dict__[_AFTER_LOADING] = self._pause_during(getattr(layer, _AFTER_LOADING))
        try:
            with self:
                yield
        finally:
            for layer in self._deferred:
                del layer.__dict__[_AFTER_LOADING]
            if self.refusal:
                self._targets, self._buckets = {}, {}

    def _pause_during(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._paused = True
            try:
                return method(*args, **kwargs)
            finally:
                self._paused = False

        return call

    def plan(self) -> CopyPlan | None:
        written = [t for t in self._targets.values() if t.kernel is not None and t.writes]
        for target in written:
            assert target.kernel is not None
            if target.read_by:
                self.refuse(f"{target.read_by} reads {target.name}")
            if not self.refusal and not target.proven:
                self._verify_writes(target, target.kernel, target.kernel.clone())
        if _addresses(self._model) != self._addresses:
            self.refuse("tensors have moved")
        if not written:
            self.refuse("nothing was copied")
        self._targets, self._buckets = {}, {}
        if self.refusal:
            return None
        kernels = [target.kernel for target in written if target.kernel is not None]
        pieces: dict[str, list[_CopyPiece]] = {name: [] for name in self._arrived}
        fills: list[tuple[Tensor, float]] = []
        for index, target in enumerate(written):
            for layout, write in target.writes.items():
                if not write.name:
                    fills.append((_storage_view(kernels[index], target.dtype, layout), write.value))
                    continue
                offset, size, stride = layout
                dtype = getattr(torch, self._arrived[write.name].dtype)
                parts = _simplify_dims(size, stride, write.stride)
                pieces[write.name].append(_CopyPiece(index, offset, write.start, parts, dtype))
        placed = {name: (entry, tuple(pieces[name])) for name, entry in self._arrived.items()}
        return CopyPlan(kernels, placed, fills)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [] if self.refusal or self._paused else _tensors_in((args, kwargs))
        keys = {_storage_key(tensor) for tensor in inputs if not tensor.is_meta and tensor.numel()}
        known = any(key in self._buckets or key in self._targets for key in keys)
        if known and func in (_ATEN.fill_.Scalar, _ATEN.zero_.default):
            if _storage_key(args[0]) in self._buckets:
                self.refuse("a tensor of the checkpoint is written to")
            else:
                value = 0.0 if func is _ATEN.zero_.default else float(args[1])
                self._record_write(args[0], _Write(None, value=value))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if not known or func.overloadpacket in _SHAPE_ONLY:
            return result
        if func.overloadpacket is _ATEN.copy_:
            self._record_copy(args[0], args[1])
            return result
        made = {_storage_key(tensor) for tensor in _tensors_in(result)}
        if func._schema.is_mutable or not made or not made <= keys:
            for key in keys:
                self._record_read(key, str(func))
        return result

    def _record_read(self, key: int, by: str) -> None:
        if key in self._buckets:
            self.refuse(f"{by} reads a tensor of the checkpoint")
        elif (target := self._targets.get(key)) is not None:
            if target.writes:
                self.refuse(f"{by} reads {target.name}")
            target.read_by = target.read_by or by

    def _record_copy(self, to: Tensor, source: Tensor) -> None:
        here, there = _storage_key(to), _storage_key(source)
        if to.is_meta or not source.numel():
            return  # vLLM only counts elements
        if here == there and _layout(to) == _layout(source) and to.dtype == source.dtype:
            return
        origin = self._targets.get(there)
        if here in self._buckets:
            self.refuse("a tensor of the checkpoint is written to")
        elif there in self._buckets:
            self._record_load(to, source, self._buckets[there])
        elif origin is not None and origin.writes:
            self._record_move(to, source, origin)
        else:
            if origin is not None:
                self._record_read(there, "a copy")
            if here in self._targets:
                name = self._targets[here].name
                self.refuse(f"{name} receives something that is not in the checkpoint")

    def _record_load(self, to: Tensor, source: Tensor, bucket: _Bucket) -> None:
        offset, shape, stride = _layout(source)
        at = offset * source.dtype.itemsize - bucket.start
        index = bisect_right(bucket.entries, at, key=lambda entry: entry.offset) - 1
        entry = bucket.entries[max(index, 0)]
        start, rest = divmod(at - entry.offset, source.dtype.itemsize)
        last = start + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        wrong_type = str(source.dtype) != f"torch.{entry.dtype}"
        if wrong_type or start < 0 or rest or last >= entry.numel:
            self.refuse(f"{entry.name} is read as something else")
            return
        source = source.expand(to.shape)
        # Tensors loaded into a kernel directly are small, such as a bias; `plan` compares them.
        data = source if self._target(to).kernel is None else source.clone()
        self._record_write(to, _Write(data, entry.name, start, source.stride()))

    def _record_write(self, to: Tensor, write: _Write) -> None:
        target = self._target(to)
        if to.dtype != target.dtype:
            self.refuse(f"{target.name} is written to as {to.dtype}")
        target.writes[_layout(to)] = write
        target.proven = False

    def _record_move(self, to: Tensor, source: Tensor, origin: _WrittenStorage) -> None:
        """Record that a whole loaded tensor was copied, along with everything that had been written
        to it."""
        target = self._target(to)
        like = (source.dtype, source.shape, source.stride())
        whole = source.untyped_storage().nbytes() == source.numel() * source.dtype.itemsize
        if not (
            whole
            and like == (to.dtype, to.shape, to.stride())
            and source.dtype == origin.dtype == target.dtype
            and (target.kernel is None or to.numel() == target.kernel.numel())
        ):
            self.refuse(f"{target.name} is made by conversion")
            return
        shift = int(to.storage_offset())
        target.writes = {
            (offset + shift, size, stride): write
            for (offset, size, stride), write in origin.writes.items()
        }
        if target.kernel is not None:
            self._verify_writes(target, to, source)

    def _verify_writes(self, target: _WrittenStorage, kernel: Tensor, truth: Tensor) -> None:
        """Check that the recorded writes alone reproduce `kernel`, no matter what it contained
        before."""
        number = sum(prod(size) for _, size, _ in target.writes)
        stride = kernel.stride()
        if number != kernel.numel() or _simplify_dims(kernel.shape, stride, stride) != (
            (number, 1, 1),
        ):
            self.refuse(f"{target.name}: {number} of its {kernel.numel()} elements are loaded")
            return
        actual, expected = _view_as_integers(kernel), _view_as_integers(truth)
        torch.bitwise_not(expected, out=actual)  # unwritten elements then differ in every bit
        for (offset, size, stride), write in target.writes.items():
            if write.data is not None:
                parts = _simplify_dims(size, stride, write.data.stride())  # as the plan does
                size, stride, inner = zip(*parts, strict=True)
                layout = int(write.data.storage_offset()), size, inner
                data = _storage_view(write.data, write.data.dtype, layout)
                _storage_view(kernel, target.dtype, (offset, size, stride)).copy_(data)
            elif not write.name:
                _storage_view(kernel, target.dtype, (offset, size, stride)).fill_(write.value)
            write.data = None
        target.proven = torch.equal(actual, expected)
        if not target.proven:
            actual.copy_(expected)
            self.refuse(f"{target.name} is not what was copied to it")

    def _target(self, tensor: Tensor) -> _WrittenStorage:
        key = _storage_key(tensor)
        if key not in self._targets:
            alive = StorageWeakRef(tensor.untyped_storage())
            self._targets[key] = _WrittenStorage(alive, tensor.dtype)
        return self._targets[key]


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _layout(tensor: Tensor) -> Layout:
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def _addresses(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
        if not tensor.is_meta
    }


def _view_as_integers(tensor: Tensor) -> Tensor:
    """View a dense tensor as a vector of 8-byte or 1-byte integers."""
    item = tensor.dtype.itemsize
    start, length = int(tensor.storage_offset()) * item, tensor.numel() * item
    width = 1 if (start | length) % 8 else 8
    return _storage_view(tensor, _INTEGERS[width], (start // width, (length // width,), (1,)))
