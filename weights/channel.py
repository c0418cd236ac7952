"""Moves bucket bytes from a trainer rank to one engine: NCCL between GPUs, gloo between CPUs, or in
place on a GPU that both use.

Each channel is a separate process group, so that an engine that dies breaks nothing else.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from keel.model.torch_internals import nccl_options, on_device
from keel.weights.buckets import ChannelData, SharedData

POLL_S = 2e-4
CHECK_S = 0.02
"""Interval for checking whether the other end has failed, which costs more than a poll."""
_NCCL_TIMEOUT = timedelta(days=1)
"""Never expires: `send` keeps the timeout itself."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"

Rendezvous = tuple[str, int]
"""Host and port of the TCPStore that both ends connect to; trainer rank 0 keeps it."""


def connect(rendezvous: Rendezvous, name: str, timeout_s: float) -> Any:
    """Connect to the store, with `name` as key prefix. Only one thread at a time may use it."""
    client = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        *rendezvous, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    return dist.PrefixStore(name, client)  # pyright: ignore[reportPrivateImportUsage]


class Channel:
    """Broadcasts from rank 0, the trainer's, to ranks 1 …, the engine's."""

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
        """`name` must be the same on all ranks and unique to this channel."""
        self._device, self._timeout_s = device, timeout_s
        self._used = False
        store = connect(rendezvous, name, timeout_s)
        self._group: Any
        """None once the channel is closed."""
        if device.type == "cuda":
            with _nccl_watchdog_off():
                self._group = dist.ProcessGroupNCCL(store, rank, size, nccl_options(_NCCL_TIMEOUT))
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0

    def send(self, flat: Tensor, check: Callable[[], None] = lambda: None) -> None:
        """Broadcast `flat` and return when its bytes have left.

        `check` is called now and then, to raise if the other end has failed. Raises TimeoutError,
        and ConnectionError if the channel breaks or is closed. Any error closes it.
        """
        if self._group is None:
            raise ConnectionError("the weight channel is closed")
        end = time.monotonic() + self._timeout_s
        late = (
            f"{flat.numel() / 2**20:.0f} MiB of weights did not get through in "
            f"{self._timeout_s:g} s (rollout.update_timeout_s) over {self._group.name()}"
        )

        def call(operation: Callable[[], Any]) -> Any:
            try:
                return operation()
            except RuntimeError as error:
                # gloo has the same timeout but raises another error.
                if time.monotonic() > end - 0.1 * self._timeout_s:
                    raise TimeoutError(late) from error
                raise ConnectionError(f"the weight channel broke: {error}") from error

        def wait_for(done: Callable[[], bool]) -> None:
            next_check = time.monotonic() + CHECK_S
            while not call(done):
                if (now := time.monotonic()) > next_check:
                    check()
                    next_check = time.monotonic() + CHECK_S
                if now > end:
                    raise TimeoutError(late)
                time.sleep(POLL_S)

        try:
            begun = self._begin(flat)
            wait_for(begun.done)  # NCCL connects here, and never gives up
            work = call(begun.result)
            wait_for(work.is_completed)
            call(work.wait)  # raises its error; orders later work after it
        except BaseException:
            self.close()
            raise
        self._used = True

    def _begin(self, flat: Tensor) -> Future[Any]:
        """Start the broadcast; the first one on a thread, since connecting may never return."""
        begun: Future[Any] = Future()
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        inference = torch.is_inference_mode_enabled()
        group = self._group

        def begin() -> None:
            try:
                with torch.cuda.stream(stream), torch.inference_mode(inference):
                    begun.set_result(group.broadcast([flat], self._options))
            except Exception as error:
                begun.set_exception(error)
            if self._group is None:  # closed meanwhile
                _abort([group])

        if self._used:
            begin()
        else:
            threading.Thread(target=begin, name="keel-channel", daemon=True).start()
        return begun

    def receive(self, data: ChannelData) -> Tensor:
        """Receive the next bucket's bytes. Raises as `send`."""
        flat = torch.empty(data.size, dtype=torch.uint8, device=self._device)
        self.send(flat)
        return flat

    def close(self) -> None:
        """Abort for good, without waiting for the peers."""
        if self._group is not None:
            last, self._group = [self._group], None
            threading.Thread(target=_abort, args=(last,), name="keel-close", daemon=True).start()


def _abort(last: list[Any]) -> None:
    """Abort a group and drop its last reference here: its destructor may block, too."""
    group = last.pop()
    with suppress(RuntimeError):  # already broken
        group.abort()


@contextmanager
def _nccl_watchdog_off() -> Iterator[None]:
    """Make every `ProcessGroupNCCL` created in this context without a watchdog.

    A watchdog ends its process when an operation of the group fails, and sets a flag in the store
    for which all trainer ranks end theirs: a lost engine would take the trainer down. PyTorch
    starts none if this variable is set when the group is created. `is_completed` and `wait` report
    failures themselves.
    """
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before


class SharedMemory:
    """A GPU buffer that one process writes bucket after bucket to and another one reads."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._handle: tuple[Any, ...] = ()

    def write(self, flat: Tensor) -> SharedData:
        """Overwrite the last bucket, which must have been read."""
        size = flat.numel()
        if self._buffer.numel() < size:
            self._buffer = torch.empty_like(flat)
            _, self._handle = reduce_tensor(self._buffer)
        self._buffer[:size].copy_(flat)
        torch.cuda.current_stream(flat.device).synchronize()
        return SharedData(self._handle, size)


class SharedView:
    """The reader's end of a `SharedMemory`."""

    def __init__(self) -> None:
        self._handle: tuple[Any, ...] = ()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self, data: SharedData, device: torch.device) -> Tensor:
        """Return a view of the bytes, valid until the next bucket is written."""
        if data.handle != self._handle:
            handle = on_device(data.handle, device.index)  # device numbers differ by process
            self._handle, self._buffer = data.handle, rebuild_cuda_tensor(*handle)
        return self._buffer[: data.size]


def gpu_id(device: torch.device) -> str:
    """Identify a GPU regardless of CUDA_VISIBLE_DEVICES; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


_CHANNEL_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ConnectionError, TimeoutError)
}
"""Errors for which an engine is replaced."""


def call_workers(llm: Any, method: str, *args: Any, several: bool) -> None:
    """Call a method of every vLLM worker and raise its error. From `several` workers, which are
    processes, vLLM returns errors as text only, so channel errors travel as data."""
    if not several:
        llm.collective_rpc(method, args=args)
        return
    for failure in llm.collective_rpc("keel_attempt", args=(method, args)):
        if failure is not None:
            kind, text = failure
            raise _CHANNEL_ERRORS[kind](text)


def attempt(worker: Any, method: str, args: tuple[Any, ...]) -> tuple[str, str] | None:
    """Call a method in a worker; return kind and text of a channel error."""
    try:
        getattr(worker, method)(*args)
    except tuple(_CHANNEL_ERRORS.values()) as error:
        kind = next(name for name, kind in _CHANNEL_ERRORS.items() if isinstance(error, kind))
        return kind, str(error)
    return None
