"""Records how vLLM's loader copies weights during one update, and turns this into a `CopyPlan`.

The recorder follows each checkpoint tensor from its bucket into the tensor that vLLM builds for a
complete layer, and from there into the tensor that kernels and CUDA graphs hold. It refuses to make
a plan if anything else happens to the weights: an operation that reads them and is not a view may
compute something that the copies would not update. At the end the plan is checked. Every loaded
tensor is inverted bit by bit, rebuilt by the plan and compared. If there is no plan, vLLM's loader
carries out every update.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from keel.weights.buckets import TensorEntry
from keel.weights.copy_plan import (
    ConstantFill,
    CopiedTensor,
    CopyPiece,
    CopyPlan,
    dims,
    start_of,
    window,
)

_AFTER_LOADING = "process_weights_after_loading"
_ATEN = torch.ops.aten
_SHAPE_ONLY = (
    *(_ATEN.empty_like, _ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like),
    *(_ATEN.new_empty, _ATEN.new_empty_strided, _ATEN.new_zeros, _ATEN.new_ones, _ATEN.new_full),
)
"""Operations that read only the shape, type and device of a tensor."""
Layout = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset in the storage, size and stride, all in elements."""


@dataclass(slots=True)
class _Write:
    """Something that was written into a part of a storage."""

    data: Tensor | None
    """The data that was written. None for a constant, and after the write has been verified."""
    name: str = ""
    """The checkpoint tensor that the data came from. Empty for a constant."""
    start: int = 0
    """Where the data starts in the checkpoint tensor, in elements."""
    stride: tuple[int, ...] = ()
    """Stride in the checkpoint tensor."""
    value: float = 0.0
    """The value of a constant."""


@dataclass(slots=True)
class _Target:
    """A storage that weights were written to. It belongs to a kernel's tensor or to an intermediate
    one."""

    alive: StorageWeakRef
    """Keeps the key of the storage from being reused."""
    dtype: torch.dtype
    name: str = ""
    kernel: Tensor | None = None
    """The tensor that kernels hold. None for an intermediate storage."""
    writes: dict[Layout, _Write] = field(default_factory=dict)
    read_by: str = ""
    """The operation that read the storage before it was written."""
    proven: bool = False


@dataclass(slots=True)
class _Bucket:
    alive: StorageWeakRef
    entries: tuple[TensorEntry, ...]
    starts: list[int]
    """Where each entry starts in the storage, in bytes."""


class LoadRecorder:
    """Records one update by vLLM's loader."""

    def __init__(self, model: nn.Module, deferred: Sequence[nn.Module] = ()) -> None:
        """Create the recorder before the update starts. `deferred` holds the layers that process
        their weights after loading. This processing is repeated in each update, so it is not
        recorded and may compute anything."""
        self.refusal = ""
        """The reason why there is no plan. Empty as long as a plan is possible."""
        self._model, self._deferred = model, deferred
        self._mode, self._paused = _Observer(self.operation), False
        self._targets: dict[int, _Target] = {}
        self._buckets: dict[int, _Bucket] = {}
        self._arrived: dict[str, TensorEntry] = {}
        self._addresses = _addresses(model)
        for name, tensor in _tensors(model):
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
        """Record how a bucket is loaded inside this context."""
        alive = StorageWeakRef(flat.untyped_storage())
        starts = [start_of(flat) + entry.offset for entry in entries]
        self._buckets[_key(flat)] = _Bucket(alive, entries, starts)
        for entry in entries:
            if entry.name in self._arrived:
                self.refuse(f"{entry.name} came twice")
            self._arrived[entry.name] = entry
        with self.watching():
            yield
        # vLLM frees the sources of a complete layer.
        self._buckets = {k: each for k, each in self._buckets.items() if not each.alive.expired()}
        self._targets = {k: each for k, each in self._targets.items() if not each.alive.expired()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record all operations of the loader inside this context, except for those of the
        `deferred` layers."""
        if self.refusal:
            yield
            return
        for layer in self._deferred:
            layer.__dict__[_AFTER_LOADING] = self._unobserved(getattr(layer, _AFTER_LOADING))
        try:
            with self._mode:
                yield
        finally:
            for layer in self._deferred:
                del layer.__dict__[_AFTER_LOADING]
            if self.refusal:
                self._release()

    def plan(self) -> CopyPlan | None:
        """Return the plan for the recorded update, or None if it was refused."""
        written = [t for t in self._targets.values() if t.kernel is not None and t.writes]
        for target in written:
            assert target.kernel is not None
            if target.read_by:
                self.refuse(f"{target.read_by} reads {target.name}")
            if not self.refusal and not target.proven:
                self._prove(target, target.kernel, target.kernel.clone())
        if _addresses(self._model) != self._addresses:
            self.refuse("tensors have moved")
        if not written:
            self.refuse("nothing was copied")
        plan = None if self.refusal else self._plan(written)
        self._release()
        return plan

    def _plan(self, written: Sequence[_Target]) -> CopyPlan:
        kernels = [target.kernel for target in written if target.kernel is not None]
        pieces: dict[str, list[CopyPiece]] = {name: [] for name in self._arrived}
        fills: list[ConstantFill] = []
        for index, target in enumerate(written):
            for (offset, size, stride), write in target.writes.items():
                if not write.name:
                    part = window(kernels[index], target.dtype, offset, size, stride)
                    fills.append(ConstantFill(part, write.value))
                    continue
                dtype = getattr(torch, self._arrived[write.name].dtype)
                parts = dims(size, stride, write.stride)
                pieces[write.name].append(CopyPiece(index, offset, write.start, parts, dtype))
        placed = {
            name: CopiedTensor(entry.dtype, entry.shape, tuple(pieces[name]))
            for name, entry in self._arrived.items()
        }
        return CopyPlan(kernels, placed, fills)

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a PyTorch operation and record what it does."""

        def run() -> Any:
            return func(*args, **kwargs)

        if self.refusal or self._paused:
            return run()
        inputs = [t for t in _leaves((args, kwargs)) if not t.is_meta and t.numel()]
        keys = {_key(tensor) for tensor in inputs}
        if not any(key in self._buckets or key in self._targets for key in keys):
            return run()
        packet = func.overloadpacket
        if packet in _SHAPE_ONLY:
            return run()
        if packet is _ATEN.copy_:
            self._copy(args[0], args[1], run)
            return args[0]
        if func in (_ATEN.fill_.Scalar, _ATEN.zero_.default):
            self._fill(args[0], 0.0 if func is _ATEN.zero_.default else float(args[1]))
            return run()
        result = run()
        made = {_key(tensor) for tensor in _leaves(result)}
        if func._schema.is_mutable or not made or not made <= keys:
            for key in keys:
                self._read(key, str(func))
        return result

    def _read(self, key: int, by: str) -> None:
        """Handle an operation other than a copy that reads or changes a storage."""
        if key in self._buckets:
            self.refuse(f"{by} reads a tensor of the checkpoint")
        elif (target := self._targets.get(key)) is not None:
            if target.writes:
                self.refuse(f"{by} reads {target.name or 'a loaded tensor'}")
            target.read_by = target.read_by or by

    def _copy(self, to: Tensor, source: Tensor, run: Callable[[], Any]) -> None:
        here, there = _key(to), _key(source)
        run()
        if to.is_meta or not source.numel():
            return  # vLLM only counts elements
        if here == there and _layout(to) == _layout(source) and to.dtype == source.dtype:
            return
        origin = self._targets.get(there)
        if here in self._buckets:
            self.refuse("a tensor of the checkpoint is written to")
        elif there in self._buckets:
            self._load(to, source, self._buckets[there])
        elif origin is not None and origin.writes:
            self._move(to, source, origin)
        else:
            if origin is not None:
                self._read(there, "a copy")
            if here in self._targets:
                name = self._targets[here].name or "a loaded tensor"
                self.refuse(f"{name} receives something that is not in the checkpoint")

    def _load(self, to: Tensor, source: Tensor, bucket: _Bucket) -> None:
        """Record that a part of a checkpoint tensor was copied."""
        item, begin = source.dtype.itemsize, start_of(source) * source.dtype.itemsize
        index = bisect_right(bucket.starts, begin) - 1
        entry = bucket.entries[max(index, 0)]
        start, rest = divmod(begin - bucket.starts[max(index, 0)], item)
        last = start + sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True))
        whole = prod(entry.shape)
        if str(source.dtype) != f"torch.{entry.dtype}" or start < 0 or rest or last >= whole:
            self.refuse(f"{entry.name} is read as something else")
            return
        source = source.expand(to.shape)
        target = self._target(to)
        # Tensors loaded into a kernel directly are small, such as a bias; `plan` compares them.
        data = source if target.kernel is None else source.clone()
        self._write(to, _Write(data, entry.name, start, source.stride()))

    def _fill(self, to: Tensor, value: float) -> None:
        if _key(to) in self._buckets:
            self.refuse("a tensor of the checkpoint is written to")
        else:
            self._write(to, _Write(None, value=value))

    def _write(self, to: Tensor, write: _Write) -> None:
        target = self._target(to)
        if to.dtype != target.dtype:
            self.refuse(f"{target.name or 'a loaded tensor'} is written to as {to.dtype}")
        target.writes[_layout(to)] = write
        target.proven = False

    def _move(self, to: Tensor, source: Tensor, origin: _Target) -> None:
        """Record that a loaded tensor was copied as a whole, along with everything that was written
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
            self.refuse(f"{target.name or 'a loaded tensor'} is made by conversion")
            return
        shift = start_of(to)
        target.writes = {
            (offset + shift, size, stride): write
            for (offset, size, stride), write in origin.writes.items()
        }
        if target.kernel is not None:
            self._prove(target, to, source)

    def _prove(self, target: _Target, kernel: Tensor, truth: Tensor) -> None:
        """Check that the recorded writes are enough to reproduce `kernel`, whatever it contained
        before."""
        number = sum(prod(size) for _, size, _ in target.writes)
        if number != kernel.numel() or not _dense(kernel):
            self.refuse(f"{target.name}: {number} of its {kernel.numel()} elements are loaded")
            return
        actual, expected = _bytes(kernel), _bytes(truth)
        torch.bitwise_not(expected, out=actual)  # unwritten elements then differ in every bit
        for (offset, size, stride), write in target.writes.items():
            if write.data is not None:
                parts = dims(size, stride, write.data.stride())  # as the plan does
                size, stride, inner = zip(*parts, strict=True)
                data = window(write.data, write.data.dtype, start_of(write.data), size, inner)
                window(kernel, target.dtype, offset, size, stride).copy_(data)
            elif not write.name:
                window(kernel, target.dtype, offset, size, stride).fill_(write.value)
            write.data = None
        target.proven = torch.equal(actual, expected)
        if not target.proven:
            actual.copy_(expected)
            self.refuse(f"{target.name} is not what was copied to it")

    def _target(self, tensor: Tensor) -> _Target:
        key = _key(tensor)
        if key not in self._targets:
            alive = StorageWeakRef(tensor.untyped_storage())
            self._targets[key] = _Target(alive, tensor.dtype)
        return self._targets[key]

    def _unobserved(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._paused = True
            try:
                return method(*args, **kwargs)
            finally:
                self._paused = False

        return call

    def _release(self) -> None:
        self._targets, self._buckets = {}, {}


class _Observer(TorchDispatchMode):
    def __init__(self, operation: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._operation = operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._operation(func, args, kwargs or {})


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))


def _key(tensor: Tensor) -> int:
    """Return a key that identifies the tensor's storage."""
    return tensor.untyped_storage()._cdata


def _layout(tensor: Tensor) -> Layout:
    return start_of(tensor), tuple(tensor.shape), tensor.stride()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _addresses(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        for name, tensor in _tensors(model)
        if not tensor.is_meta
    }


def _bytes(tensor: Tensor) -> Tensor:
    """View a dense tensor as a vector of 8-byte or 1-byte integers."""
    start, length = (count * tensor.dtype.itemsize for count in (start_of(tensor), tensor.numel()))
    wide = not (start | length) % 8
    width, dtype = (8, torch.int64) if wide else (1, torch.uint8)
    return window(tensor, dtype, start // width, (length // width,), (1,))


def _dense(tensor: Tensor) -> bool:
    """Return True if the tensor has no gaps, whatever the order of its dimensions."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    ((length, inner, _), *more) = dims(shape, stride, stride)
    return not more and inner == 1 and length == tensor.numel()
