"""The trainer's side of a weight update.

A `BucketPacker` packs the model's checkpoint tensors into buckets. Converting a tensor to its
checkpoint name takes about 50 µs, and a mixture-of-experts model has tens of thousands of tensors.
The first update therefore records where each checkpoint tensor is located in the model, and later
ones copy large contiguous blocks, such as all experts of a layer at once.

A `Sender` sends the buckets of its rank to the engines: through a channel, or in place if an engine
shares the rank's GPU. Each bucket is announced through the control channel. A single call to the
engine's actor runs for the whole update, and reports an error if the engine fails. The updates of
the other engines continue.
"""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import torch
from ray.exceptions import GetTimeoutError, RayTaskError
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from keel.model import ray_timeouts
from keel.model.load import Named, Whole, as_checkpoint, module_tensors, precision
from keel.weights.buckets import Bucket, ChannelData, Checksum, FlatBucket, TensorEntry, pack_flat
from keel.weights.channel import Channel, Mailbox, Rendezvous, SharedMemory, gpu_id
from keel.weights.sync import Outcome, Receiver

_GRACE_S = 5.0  # seconds to wait for the engine to report an error after a channel breaks


@dataclass(frozen=True, slots=True)
class _ContiguousRun:
    """Elements that are contiguous both in a module's tensor and in a bucket."""

    source: str
    start: int
    count: int
    bucket: int
    at: int  # offset in the bucket, in bytes
    dtype: torch.dtype


class BucketPacker:
    """Packs a model's weights. The model's modules and shapes must not change."""

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        bucket_bytes: int,
        *,
        whole: Whole | None = None,
    ) -> None:
        """Create a packer. `dtype` is the engines' dtype. See also `pack_flat` and
        `module_tensors`."""
        self._model, self._size, self._whole = model, bucket_bytes, whole
        self._in_engine_dtype = precision(model, dtype)
        self._tables: list[tuple[tuple[TensorEntry, ...], int]] = []
        """Tensor table and size in bytes of each bucket."""
        self._runs: list[list[_ContiguousRun]] = []
        self._computed: set[int] = set()
        """Modules whose checkpoint tensors are not simply parts of the module's tensors."""

    def buckets(self) -> Iterator[FlatBucket]:
        """Pack the current weights and yield the buckets. The first call needs as much memory as
        `pack_flat`. Later calls hold only one bucket and one module in memory at a time."""
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
                places = {name: _find_source(tensor, local) for name, tensor in named.items()}
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
        runs: list[list[_ContiguousRun]] = [[] for _ in range(modules)]
        for number, (entries, _) in enumerate(tables):
            for entry in entries:
                module, source, start = origins[entry.name]
                dtype = getattr(torch, entry.dtype)
                _append_run(
                    runs[module],
                    _ContiguousRun(source, start, entry.numel, number, entry.offset, dtype),
                )
        self._tables, self._runs, self._computed = tables, runs, computed

    def _named(self, local: Named) -> Named:
        try:
            with _SkipContiguous():
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


class _SkipContiguous(TorchFunctionMode):
    """Turns `contiguous` into a no-op. transformers calls it before splitting a tensor, which makes
    a copy. Without the copy, the parts are views that show where their elements come from."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _find_source(tensor: Tensor, local: Mapping[str, Tensor]) -> tuple[str, int] | None:
    """Find the tensor in `local` that contains this tensor as one contiguous range. Returns its
    name and the offset of the first element, or None if there is no such tensor."""
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


def _append_run(runs: list[_ContiguousRun], run: _ContiguousRun) -> None:
    if runs:
        last = runs[-1]
        bytes_before = last.count * last.dtype.itemsize
        after = replace(last, start=last.start + last.count, at=last.at + bytes_before)
        if run == replace(after, count=run.count):
            runs[-1] = replace(last, count=last.count + run.count)
            return
    runs.append(run)


@dataclass(slots=True)
class _Link:
    actor_hash: int
    """Hash of the actor handle, to detect a replaced engine. Storing the handle would keep the
    actor alive."""
    mailbox: Mailbox
    channel: Channel | None  # None if the engine and the rank share a GPU
    memory: SharedMemory = field(default_factory=SharedMemory)
    receiving: Any = None
    sending: bool = False
    """True while a bucket is sent through the channel, and after sending failed."""
    reached: bool = False

    def send(self, bucket: FlatBucket) -> None:
        """Send a bucket and return once the engine has received the bytes. The engine loads them
        while the next bucket is being packed."""
        entries, flat = bucket
        self.mailbox.wait(self._check)
        if self.channel is None:
            self.mailbox.put("load_bucket", Bucket(entries=entries, data=self.memory.write(flat)))
            return
        self.mailbox.put("load_bucket", Bucket(entries=entries, data=ChannelData(flat.numel())))
        self.sending = True
        try:
            self.channel.send(flat, self._check)
        except ConnectionError:
            _raise_failure(self.receiving)
            raise
        self.sending, self.reached = False, True

    def finish(self, version: int, checksum: int) -> None:
        self.mailbox.wait(self._check)
        self.mailbox.put("finish_update", version, checksum)
        self.mailbox.wait(self._check)
        self.memory = SharedMemory()

    def _check(self) -> None:
        _raise_failure(self.receiving, wait_s=0)

    def close(self) -> None:
        self.mailbox.close()
        if self.channel is not None:
            self.channel.close()


class Sender:
    """Sends weights from a trainer rank to its engines."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device, *, timeout_s: float) -> None:
        self._rendezvous, self._device, self._timeout_s = rendezvous, device, timeout_s
        self._links: dict[int, _Link] = {}
        self._reached = False

    def send(
        self, buckets: Iterator[FlatBucket], receivers: Sequence[Receiver], version: int
    ) -> dict[int, Outcome]:
        """Send weights tagged with `version`, and return each engine's outcome by index. Consumes
        all of `buckets` even if every engine fails, because under ZeRO-3 the other ranks take part
        in gathering each bucket."""
        outcomes: dict[int, Outcome] = {}
        remaining, first = list(receivers), not self._reached

        def for_each(act: Callable[..., None], *args: Any) -> None:
            for receiver in tuple(remaining):
                try:
                    act(receiver, *args)
                except Exception as error:  # the other engines continue
                    remaining.remove(receiver)
                    outcomes[receiver.index] = self._failure(receiver.index, error, first=first)

        checksum, begun = Checksum(), False
        for bucket in buckets:
            if not begun:  # by now the rank has freed memory for an engine that wakes up
                for_each(self._begin)
                begun = True
            if receivers:
                checksum.add(bucket[1])
            for_each(lambda receiver, bucket: self._links[receiver.index].send(bucket), bucket)
            self._reached |= any(link.reached for link in self._links.values())
            del bucket  # frees memory for the next one
        total = checksum.value()
        for_each(lambda receiver: self._links[receiver.index].finish(version, total))
        return {**outcomes, **{receiver.index: version for receiver in remaining}}

    def _failure(self, index: int, error: Exception, *, first: bool) -> Exception:
        link = self._links.get(index)
        self._unlink(index)
        cause = error.cause if isinstance(error, RayTaskError) else None
        failure = cause if isinstance(cause, Exception) else error
        if isinstance(failure, ConnectionError):
            # Either end may have noticed; the other may be gone before Ray knows.
            failure = TimeoutError(str(failure))
        unreached = first and link is not None and link.sending and not link.reached
        if isinstance(failure, TimeoutError) and unreached:
            failure = RuntimeError(
                f"engine {index} cannot be reached from {socket.gethostname()}: {failure}. Set "
                "rollout.weight_transfer to store, or see what NCCL does with NCCL_DEBUG=INFO; "
                "NCCL_SOCKET_IFNAME names the network interface to use"
            )
        for each in (error, failure):
            while each is not None:  # frames in tracebacks would keep buckets in GPU memory
                each.__traceback__ = None
                each = each.__cause__ or each.__context__
        return failure

    def _begin(self, receiver: Receiver) -> None:
        index, actor = receiver.index, receiver.actor
        if index in self._links and self._links[index].actor_hash != hash(actor):
            self._unlink(index)
        if index not in self._links:
            self._links[index] = self._open(actor)
        link = self._links[index]
        link.receiving = ray_timeouts.call(actor.receive)
        link.mailbox.put("begin_update")

    def _unlink(self, index: int) -> None:
        if (link := self._links.pop(index, None)) is not None:
            link.close()

    def _open(self, actor: Any) -> _Link:
        gpus: list[str] = self._get(ray_timeouts.call(actor.gpus), "an engine to report its GPUs")
        shared = gpus == [gpu_id(self._device)] != [""]
        name = uuid4().hex  # the store keeps the addresses of earlier links under their names
        joined = ray_timeouts.call(actor.join, self._rendezvous, name, shared)
        channel: Channel | None = None
        size, device, timeout_s = 1 + len(gpus), self._device, self._timeout_s
        try:
            if not shared:
                channel = Channel(
                    self._rendezvous, name, rank=0, size=size, device=device, timeout_s=timeout_s
                )
        except Exception as error:  # gloo waits for the engine in its constructor
            _raise_failure(joined)
            raise TimeoutError(f"no channel to the engine: {error}") from error
        try:
            self._get(joined, f"an engine to reach the rendezvous store at {self._rendezvous}")
        except BaseException:
            if channel is not None:
                channel.close()
            raise
        mailbox = Mailbox(self._rendezvous, name, timeout_s=timeout_s)
        return _Link(hash(actor), mailbox, channel)

    def _get(self, answer: Any, what: str) -> Any:
        try:
            return ray_timeouts.get(answer, seconds=self._timeout_s)
        except GetTimeoutError as error:
            late = f"waited {self._timeout_s:g} s (rollout.update_timeout_s) for {what}"
            raise TimeoutError(late) from error


def _raise_failure(answer: Any, wait_s: float | None = None) -> None:
    """Raise the error of the call to the engine, if there is one, because it is more informative
    than the channel's error."""
    ready, _ = ray_timeouts.wait([answer], seconds=_GRACE_S if wait_s is None else wait_s)
    if ready:
        ray_timeouts.get(answer, seconds=ray_timeouts.CALL_S)
