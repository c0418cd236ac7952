"""Carry weights from a trainer rank to an engine.

Named tensors are packed into buckets: flat buffers with a table of their tensors, so that thousands
of tensors need only a few large transfers. The bytes of a bucket are sent through a `Channel`,
which uses NCCL between GPUs and gloo between CPUs. Each channel has its own process group, so an
engine that dies does not affect the others. If the rank and the engine share a GPU, the bytes go
through `SharedMemory` instead.

Control messages go through the rendezvous store (`Mailbox`). This takes a fraction of a
millisecond, compared to several milliseconds for an actor call.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from keel.model.torch_internals import nccl_options, with_local_index
from keel.rl.futures import on_thread, settle

ALIGNMENT = 64  # alignment of tensors in bytes, so that they can be used without copying
POLL_S = 1e-4
_CHECK_S = 0.02
"""Seconds between checks that the peer is alive. Such a check is more expensive than a poll."""
_NCCL_TIMEOUT = timedelta(days=1)  # never reached, because `_broadcast` has its own timeout
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"

Rendezvous = tuple[str, int]
"""Host and port of the TCPStore that ranks and engines connect to. It runs on trainer rank 0."""


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


class BucketData(Protocol):
    """The bytes of a bucket, or where an engine's worker finds them."""

    checked: ClassVar[bool]
    """True if the bytes are part of the update's checksum."""

    def read(self, receiver: Receiver, *, to_device: bool, keep: bool) -> Tensor:
        """Return the bytes [size] uint8. Unless `to_device` is set, they may be in host memory.
        With `keep`, they stay valid until the next bucket is read, otherwise until `release`."""
        ...

    def release(self) -> None:
        """Allow the sender to overwrite the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors packed into one flat buffer, as sent to an engine."""

    entries: tuple[TensorEntry, ...]
    data: BucketData


@dataclass(frozen=True, slots=True)
class BeginUpdate:
    """Tells the engine to pause sampling and to expect buckets of new weights."""


@dataclass(frozen=True, slots=True)
class FinishUpdate:
    """Tells the engine to check the weights and to sample from them."""

    version: int
    checksum: int


Message = BeginUpdate | Bucket | FinishUpdate
"""A part of an update. `EngineThread.update_from_rank` carries it out."""

FlatBucket = tuple[tuple[TensorEntry, ...], Tensor]
"""A bucket on the device of its tensors: the tensor table and the bytes as one flat tensor."""


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


# Transport.


def _connect(rendezvous: Rendezvous, name: str, timeout_s: float) -> Any:
    """Connect to the store, prefixing all keys with `name`. The connection is not thread-safe."""
    client = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        *rendezvous, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    return dist.PrefixStore(name, client)  # pyright: ignore[reportPrivateImportUsage]


def _poll(done: Callable[[], bool], check: Callable[[], None], end: float, late: str) -> None:
    next_check = time.monotonic() + _CHECK_S
    while not done():
        if (now := time.monotonic()) > next_check:
            check()
            next_check = time.monotonic() + _CHECK_S
        if now > end:
            raise TimeoutError(late)
        time.sleep(POLL_S)


class Channel:
    """A process group for broadcasting weights from the trainer (rank 0) to an engine's workers."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        name: str,
        *,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._device, self._timeout_s = device, timeout_s
        self._used = False
        store = _connect(rendezvous, name, timeout_s)
        self._group: Any
        if device.type == "cuda":
            with _nccl_watchdog_off():
                self._group = dist.ProcessGroupNCCL(store, rank, size, nccl_options(_NCCL_TIMEOUT))
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0

    def send(self, flat: Tensor, check: Callable[[], None] = lambda: None) -> None:
        """Send the bytes of `flat` to the engine's workers and wait until all have been sent.
        `check` raises an error if the engine has failed. See `_broadcast`."""
        self._broadcast(flat, check)

    def receive(self, size: int) -> Tensor:
        """Receive the bytes of a bucket. See `_broadcast`."""
        flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._broadcast(flat, lambda: None)
        return flat

    def _broadcast(self, flat: Tensor, check: Callable[[], None]) -> None:
        """Take part in a broadcast of `flat` from the trainer. Raises TimeoutError if it takes too
        long, and ConnectionError if the channel breaks or is closed. Any error closes the
        channel."""
        if self._group is None:
            raise ConnectionError("the weight channel is closed")
        end = time.monotonic() + self._timeout_s
        late = (
            f"{flat.numel() / 2**20:.0f} MiB of weights did not get through in "
            f"{self._timeout_s:g} s (rollout.update_timeout_s) over {self._group.name()}. If none "
            "ever do, NCCL_DEBUG=INFO says why, and rollout.weight_transfer: store avoids it"
        )

        def call(operation: Callable[[], Any]) -> Any:
            try:
                return operation()
            except RuntimeError as error:
                # gloo has the same timeout but raises another error.
                if time.monotonic() > end - 0.1 * self._timeout_s:
                    raise TimeoutError(late) from error
                raise ConnectionError(f"the weight channel broke: {error}") from error

        try:
            begun = self._start_broadcast(flat)
            _poll(begun.done, check, end, late)  # NCCL connects here, and never gives up
            work = call(begun.result)
            _poll(lambda: call(work.is_completed), check, end, late)
            call(work.wait)  # raises its error; orders later work after it
        except BaseException:
            self.close()
            raise
        self._used = True

    def _start_broadcast(self, flat: Tensor) -> Future[Any]:
        """Start a broadcast. The first one runs on another thread, because NCCL may block while
        connecting."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        inference = torch.is_inference_mode_enabled()
        group = self._group

        def begin() -> Any:
            try:
                with torch.cuda.stream(stream), torch.inference_mode(inference):
                    return group.broadcast([flat], self._options)
            finally:
                if self._group is None:  # closed meanwhile
                    _abort([group])

        if not self._used:
            return on_thread(begin, "keel-channel")
        begun: Future[Any] = Future()
        settle(begun, begin)
        return begun

    def close(self) -> None:
        if self._group is not None:
            last, self._group = [self._group], None
            threading.Thread(target=_abort, args=(last,), name="keel-close", daemon=True).start()


def _abort(last: list[Any]) -> None:
    """Abort the process group and drop the last reference to it on this thread, because the
    destructor may block."""
    group = last.pop()
    with suppress(RuntimeError):  # already broken
        group.abort()


@contextmanager
def _nccl_watchdog_off() -> Iterator[None]:
    """Create `ProcessGroupNCCL` objects without a watchdog thread inside this context.

    When an operation in the group fails, a watchdog terminates its process and sets a flag in the
    store that makes all other trainer ranks exit. Losing an engine would then take down the
    trainer. PyTorch doesn't start a watchdog if this environment variable is set when the group is
    created. `is_completed` and `wait` still report failures.
    """
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        del os.environ[_BLOCKING_WAIT]
        if before is not None:
            os.environ[_BLOCKING_WAIT] = before


class Mailbox:
    """Control channel from the trainer to an engine. The trainer calls `send`, `wait` and `close`;
    the engine calls `receive` and `acknowledge`."""

    def __init__(self, rendezvous: Rendezvous, name: str, *, timeout_s: float) -> None:
        self._store = _connect(rendezvous, f"{name}/mailbox", timeout_s)
        self._timeout_s = timeout_s
        self._acknowledged = 0

    @property
    def _key(self) -> str:
        return str(self._acknowledged)

    def send(self, message: Message) -> None:
        """Send a message. Call `wait` before sending the next one."""
        self._store.set(self._key, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until the engine acknowledges the message. `check` raises an error if the engine has
        failed."""
        late = f"waited {self._timeout_s:g} s (rollout.update_timeout_s) for an engine's answer"
        end = time.monotonic() + self._timeout_s
        _poll(lambda: not self._store.check([self._key]), check, end, late)
        self._acknowledged += 1

    def close(self) -> None:
        self._store.delete_key(self._key)

    def receive(self) -> Message:
        """Wait for the next message and return it."""
        try:
            return pickle.loads(self._store.get(self._key))
        except dist.DistNetworkError as error:
            raise ConnectionError(f"lost the trainer during an update: {error}") from error
        except dist.DistStoreError as error:
            late = f"waited {self._timeout_s:g} s for the trainer to send weights"
            raise TimeoutError(late) from error

    def acknowledge(self) -> None:
        """Acknowledge the last message, so that the trainer can send the next one."""
        key = self._key
        self._acknowledged += 1  # first: without the key, the sender may send again
        self._store.delete_key(key)


class SharedMemory:
    """GPU buffer that passes buckets to another process, one at a time."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._handle: tuple[Any, ...] = ()

    def write(self, flat: Tensor) -> SharedData:
        """Copy a bucket to the buffer. The reader must have finished reading the previous one."""
        size = flat.numel()
        if self._buffer.numel() < size:
            self._buffer = torch.empty_like(flat)
            _, self._handle = reduce_tensor(self._buffer)
        self._buffer[:size].copy_(flat)
        torch.cuda.current_stream(flat.device).synchronize()
        return SharedData(self._handle, size)


class SharedView:
    """The reader's view of a `SharedMemory`."""

    def __init__(self) -> None:
        self._handle: tuple[Any, ...] = ()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self, data: SharedData, device: torch.device) -> Tensor:
        """Return the bucket as a view that is valid until the next bucket is written."""
        if data.handle != self._handle:
            handle = with_local_index(data.handle, device.index)  # device numbers differ by process
            self._handle, self._buffer = data.handle, rebuild_cuda_tensor(*handle)
        return self._buffer[: data.size]


@dataclass(slots=True)
class Receiver:
    """State of an engine's worker that reads the bytes of buckets."""

    device: torch.device
    channel: Channel | None = None
    view: SharedView = field(default_factory=SharedView)


@dataclass(frozen=True, slots=True)
class HostData:
    """Bytes in host memory, which came through Ray's object store."""

    array: NDArray[np.uint8]
    checked: ClassVar[bool] = False

    def read(self, receiver: Receiver, *, to_device: bool, keep: bool) -> Tensor:
        writeable = self.array.flags.writeable  # not in Ray's object store
        flat = torch.from_numpy(self.array if writeable else self.array.copy())
        return flat.to(receiver.device) if to_device else flat

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ChannelData:
    """Bytes that will follow on the receiver's `Channel`."""

    size: int
    checked: ClassVar[bool] = True

    def read(self, receiver: Receiver, *, to_device: bool, keep: bool) -> Tensor:
        if receiver.channel is None:
            raise ConnectionError("the weight channel is not open")
        return receiver.channel.receive(self.size)

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SharedData:
    """Bytes on a GPU shared by sender and receiver (CUDA IPC)."""

    handle: tuple[Any, ...]
    size: int
    checked: ClassVar[bool] = True

    def read(self, receiver: Receiver, *, to_device: bool, keep: bool) -> Tensor:
        flat = receiver.view.read(self, receiver.device)
        if keep:
            flat = flat.clone()
            self.release()
        return flat

    def release(self) -> None:
        torch.cuda.current_stream().synchronize()


def gpu_id(device: torch.device) -> str:
    """Return an identifier for a GPU that does not depend on CUDA_VISIBLE_DEVICES, or "" for a
    CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def call_workers(llm: Any, method: str, *args: Any) -> None:
    """Call a method on every vLLM worker, and raise the first error. vLLM forwards errors from
    other processes only as text, so workers return channel errors as values (see `attempt`).
    The engine is replaced after such an error."""
    for failure in llm.collective_rpc("keel_attempt", args=(method, args)):
        if failure is not None:
            kind, text = failure
            raise kind(text)


def attempt(worker: Any, method: str, args: tuple[Any, ...]) -> tuple[type[OSError], str] | None:
    """Call a method on a worker, and return the type and message of a channel error instead of
    raising it."""
    try:
        getattr(worker, method)(*args)
    except (ConnectionError, TimeoutError) as error:
        return TimeoutError if isinstance(error, TimeoutError) else ConnectionError, str(error)
    return None
