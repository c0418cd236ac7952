"""The trainer's side of a weight update.

A `BucketPacker` packs the model's checkpoint tensors into buckets. Converting a tensor to its
checkpoint name takes about 50 µs, and a mixture-of-experts model has tens of thousands of tensors.
The first update therefore records where each checkpoint tensor is located in the model. Later ones
copy large contiguous blocks, such as all experts of a layer at once.

A `Sender` sends the buckets of its rank to the engines: through a channel, or in place if an engine
shares the rank's GPU. Each bucket is announced through the control channel. A single call to the
engine's actor runs for the whole update, and reports an error if the engine fails. The updates of
the other engines continue.
"""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from ray.exceptions import GetTimeoutError
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from keel.model import ray_timeouts
from keel.model.load import Named, Whole, as_checkpoint, module_tensors, precision
from keel.weights.channel import (
    ALIGNMENT,
    BeginUpdate,
    Bucket,
    Channel,
    ChannelData,
    Checksum,
    FinishUpdate,
    FlatBucket,
    Mailbox,
    Rendezvous,
    SharedMemory,
    TensorEntry,
    gpu_id,
)

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
        """Create a packer for buckets of at most `bucket_bytes` plus padding. A larger tensor gets
        a separate bucket. `dtype` is the engines' dtype. See also `module_tensors`."""
        self._model, self._bucket_bytes, self._whole = model, bucket_bytes, whole
        self._in_engine_dtype = precision(model, dtype)
        self._planned = False
        self._tables: list[list[TensorEntry]] = []
        self._sizes: list[int] = []  # of the buckets, in bytes
        self._runs: list[list[_ContiguousRun]] = []  # of each module
        self._computed: set[int] = set()
        """Modules whose checkpoint tensors are not simply parts of the module's tensors."""

    def buckets(self) -> Iterator[FlatBucket]:
        """Pack the current weights and yield the buckets. Only one bucket and one module are in
        memory at a time."""
        if not self._planned:
            self._tables, self._sizes, self._runs, self._computed = [], [], [], set()
        number, flat = -1, torch.empty(0)
        for index, local in enumerate(module_tensors(self._model, whole=self._whole)):
            if not self._planned:
                self._runs.append(self._plan(local))
            sources = as_checkpoint(self._model, local) if index in self._computed else local
            for run in self._runs[index]:
                end = run.at + run.count * run.dtype.itemsize
                if run.bucket != number:
                    if number >= 0:
                        yield tuple(self._tables[number]), flat[: self._sizes[number]]
                        flat = torch.empty(0)  # frees memory for the next one
                    number, device = run.bucket, sources[run.source].device
                    most = max(self._bucket_bytes, end) + ALIGNMENT  # as more tensors may follow
                    size = self._sizes[number] if self._planned else most
                    flat = torch.zeros(size, dtype=torch.uint8, device=device)
                part = sources[run.source].reshape(-1)[run.start : run.start + run.count]
                if run.count:
                    flat[run.at : end].view(run.dtype).copy_(part)
        self._planned = True
        if number >= 0:
            yield tuple(self._tables[number]), flat[: self._sizes[number]]

    def _plan(self, local: Named) -> list[_ContiguousRun]:
        """Add the next module's checkpoint tensors to the tables, and return how to copy them."""
        try:
            with _SkipContiguous():
                named = as_checkpoint(self._model, local)
        except RuntimeError:  # a conversion that needs a contiguous tensor
            named = as_checkpoint(self._model, local)
        places = {name: _find_source(tensor, local) for name, tensor in named.items()}
        found = {name: place for name, place in places.items() if place is not None}
        if len(found) < len(places):
            self._computed.add(len(self._runs))
            found = {name: (name, 0) for name in named}
        runs: list[_ContiguousRun] = []
        for name in sorted(named, key=found.__getitem__):  # neighbours in memory form one run
            tensor = named[name]
            dtype = self._in_engine_dtype(name, tensor.new_empty(0)).dtype
            length = tensor.numel() * dtype.itemsize
            if not self._sizes or self._sizes[-1] + length > self._bucket_bytes:
                self._tables.append([])
                self._sizes.append(0)
            bucket, at = len(self._sizes) - 1, self._sizes[-1]
            entry = TensorEntry(name, str(dtype).removeprefix("torch."), tuple(tensor.shape), at)
            self._tables[-1].append(entry)
            self._sizes[-1] += length + -length % ALIGNMENT
            _append_run(runs, _ContiguousRun(*found[name], tensor.numel(), bucket, at, dtype))
        return runs


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
    """The connection from a rank to one engine."""

    index: int
    actor_hash: int
    """Hash of the actor handle, to detect a replaced engine. Storing the handle would keep the
    actor alive."""
    mailbox: Mailbox
    channel: Channel | None  # None if the engine and the rank share a GPU
    untested: bool
    """True until a bucket has reached this engine, if none had reached any engine before."""
    memory: SharedMemory = field(default_factory=SharedMemory)
    updating: Any = None  # the engine's `update_from_rank` call

    def send(self, bucket: FlatBucket) -> None:
        """Send a bucket and return once the engine has received the bytes. The engine loads them
        while the next bucket is being packed."""
        entries, flat = bucket
        self.mailbox.wait(self._check)
        data = self.memory.write(flat) if self.channel is None else ChannelData(flat.numel())
        self.mailbox.send(Bucket(entries=entries, data=data))
        if self.channel is not None:
            try:
                self.channel.send(flat, self._check)
            except ConnectionError:
                _raise_failure(self.updating)
                raise
            except TimeoutError as error:
                if not self.untested:
                    raise
                raise RuntimeError(  # ends the run, as a restarted engine would not help
                    f"engine {self.index} cannot be reached from {socket.gethostname()}: "
                    f"{ray_timeouts.cause(error)}; NCCL_SOCKET_IFNAME names the network interface "
                    "to use"
                ) from error
            self.untested = False

    def finish(self, version: int, checksum: int) -> None:
        self.mailbox.wait(self._check)
        self.mailbox.send(FinishUpdate(version, checksum))
        self.mailbox.wait(self._check)
        self.memory = SharedMemory()

    def _check(self) -> None:
        _raise_failure(self.updating, wait_s=0)

    def close(self) -> None:
        self.mailbox.close()
        if self.channel is not None:
            self.channel.close()


class Sender:
    """Sends weights from a trainer rank to its engines."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device, *, timeout_s: float) -> None:
        self._rendezvous, self._device, self._timeout_s = rendezvous, device, timeout_s
        self._links: dict[int, _Link] = {}
        self._reached = False  # True once a bucket has reached an engine

    def send(
        self, buckets: Iterator[FlatBucket], engines: Mapping[int, Any], version: int
    ) -> dict[int, int | Exception]:
        """Send weights tagged with `version` to engines, given as actors by index. Returns for each
        engine the version that it samples from, or the error that stopped its update. Consumes all
        of `buckets` even if every engine fails, because under ZeRO-3 the other ranks take part in
        gathering each bucket."""
        results: dict[int, int | Exception] = dict.fromkeys(engines, version)

        def for_each(act: Callable[[int], None]) -> None:
            for index in [index for index, result in results.items() if result == version]:
                try:
                    act(index)
                except Exception as error:  # the other engines continue
                    self._unlink(index)
                    results[index] = _plain_error(error)

        checksum, begun = Checksum(), False
        for bucket in buckets:
            if not begun:  # by now the rank has freed memory for an engine that wakes up
                for_each(lambda index: self._begin(index, engines[index]))
                begun = True
            if engines:
                checksum.add(bucket[1])
            for_each(partial(self._send_bucket, bucket))
            del bucket  # frees memory for the next one
        total = checksum.value()
        for_each(lambda index: self._links[index].finish(version, total))
        return results

    def _send_bucket(self, bucket: FlatBucket, index: int) -> None:
        self._links[index].send(bucket)
        self._reached = True

    def _begin(self, index: int, actor: Any) -> None:
        if index in self._links and self._links[index].actor_hash != hash(actor):
            self._unlink(index)
        if index not in self._links:
            self._links[index] = self._open(index, actor)
        link = self._links[index]
        link.updating = ray_timeouts.call(actor.update_from_rank)
        link.mailbox.send(BeginUpdate())

    def _unlink(self, index: int) -> None:
        if (link := self._links.pop(index, None)) is not None:
            link.close()

    def _open(self, index: int, actor: Any) -> _Link:
        gpus: list[str] = self._get(ray_timeouts.call(actor.gpus), "an engine to report its GPUs")
        shared = gpus == [gpu_id(self._device)] != [""]
        name = uuid4().hex  # the store keeps the addresses of earlier links under their names
        connected = ray_timeouts.call(actor.connect, self._rendezvous, name, shared)
        channel: Channel | None = None
        size, device, timeout_s = 1 + len(gpus), self._device, self._timeout_s
        try:
            if not shared:
                channel = Channel(
                    self._rendezvous, name, rank=0, size=size, device=device, timeout_s=timeout_s
                )
        except Exception as error:  # gloo waits for the engine in its constructor
            _raise_failure(connected)
            raise TimeoutError(f"no channel to the engine: {error}") from error
        try:
            self._get(connected, f"an engine to reach the rendezvous store at {self._rendezvous}")
        except BaseException:
            if channel is not None:
                channel.close()
            raise
        mailbox = Mailbox(self._rendezvous, name, timeout_s=timeout_s)
        return _Link(index, hash(actor), mailbox, channel, untested=not self._reached)

    def _get(self, answer: Any, what: str) -> Any:
        try:
            return ray_timeouts.get(answer, seconds=self._timeout_s)
        except GetTimeoutError as error:
            late = f"waited {self._timeout_s:g} s (rollout.update_timeout_s) for {what}"
            raise TimeoutError(late) from error


def _plain_error(error: Exception) -> Exception:
    """Return an engine's own error without tracebacks, whose frames would keep buckets in GPU
    memory."""
    cause = ray_timeouts.cause(error)
    result = cause if isinstance(cause, Exception) else error
    if isinstance(result, ConnectionError):
        # Ray may not know yet that the engine died, so report a timeout.
        result = TimeoutError(str(result))
    for each in (error, result):
        while each is not None:
            each.__traceback__ = None
            each = each.__cause__ or each.__context__
    return result


def _raise_failure(answer: Any, wait_s: float | None = None) -> None:
    """Raise the error of the call to the engine, if there is one, because it is more informative
    than the channel's error."""
    ready, _ = ray_timeouts.wait([answer], seconds=_GRACE_S if wait_s is None else wait_s)
    if ready:
        ray_timeouts.get(answer, seconds=ray_timeouts.CALL_S)
