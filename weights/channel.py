"""Buckets of bytes straight from a trainer's rank to one engine: NCCL between GPUs, gloo else.

A channel is a process group of its own, beside those that the trainer and the engine have, so that
an engine which dies ends its own channel and nothing else.
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
from keel.weights.buckets import Sent, Shared

POLL_S = 2e-4
CHECK_S = 0.02
"""How often to look whether the other end has failed, which costs more than to look for its
answer."""
NEVER = timedelta(days=1)
"""The timeout that NCCL is given: `send` keeps the deadline itself."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"

Rendezvous = tuple[str, int]
"""Host and port of the TCPStore that both ends connect to; rank 0 keeps it."""


def connect(rendezvous: Rendezvous, name: str, timeout_s: float) -> Any:
    """The store, with `name` before its keys. One thread at a time may use it."""
    client = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        *rendezvous, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    return dist.PrefixStore(name, client)  # pyright: ignore[reportPrivateImportUsage]


class Channel:
    """Rank 0 sends; ranks 1 … are those of the engine."""

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
        """`name` is the same on all ranks and belongs to this channel alone."""
        self._device, self._timeout_s = device, timeout_s
        self.used = False
        """Whether anything got through yet."""
        deadline = timedelta(seconds=timeout_s)
        store = connect(rendezvous, name, timeout_s)
        self._group: Any
        """None once the channel is closed."""
        if device.type == "cuda":
            with unwatched():
                self._group = dist.ProcessGroupNCCL(store, rank, size, nccl_options(NEVER))
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, deadline)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0

    def send(self, flat: Tensor, check: Callable[[], None] = lambda: None) -> None:
        """Returns when the bytes have left. `check` is called now and then, to raise if the other
        end has gone. Raises TimeoutError after the deadline and ConnectionError if the channel
        breaks, or is closed: after any error it is."""
        if self._group is None:
            raise ConnectionError("the channel for weights has been closed")
        end = time.monotonic() + self._timeout_s
        late = (
            f"{flat.numel() / 2**20:.0f} MiB of weights did not get through in "
            f"{self._timeout_s:g} s (rollout.update_timeout_s) over {self._group.name()}"
        )

        def ask(group: Callable[[], Any]) -> Any:
            try:
                return group()
            except RuntimeError as error:
                # gloo has the same deadline, and says so in its own words.
                if time.monotonic() > end - 0.1 * self._timeout_s:
                    raise TimeoutError(late) from error
                raise ConnectionError(f"the channel for weights broke: {error}") from error

        def wait_for(done: Callable[[], bool]) -> None:
            look = time.monotonic() + CHECK_S
            while not ask(done):
                if (now := time.monotonic()) > look:
                    check()
                    look = time.monotonic() + CHECK_S
                if now > end:
                    raise TimeoutError(late)
                time.sleep(POLL_S)

        try:
            begun = self._begin(flat)
            wait_for(begun.done)  # NCCL meets the other end here, and does not give up by itself
            work = ask(begun.result)
            wait_for(work.is_completed)
            ask(work.wait)  # raises if it failed; orders what follows after it
        except BaseException:
            self.close()
            raise
        self.used = True

    def _begin(self, flat: Tensor) -> Future[Any]:
        """The broadcast, given to the group: the first time by a thread that may never return."""
        begun: Future[Any] = Future()
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        inference = torch.is_inference_mode_enabled()
        group = self._group

        def begin() -> None:
            try:
                with torch.cuda.stream(stream), torch.inference_mode(inference):
                    begun.set_result(group.broadcast([flat], self._options))
            except Exception as error:  # belongs to who waits
                begun.set_exception(error)
            if self._group is None:  # closed meanwhile: nobody waits for it any more
                _end([group])

        if self.used:
            begin()
        else:
            threading.Thread(target=begin, name="keel-channel", daemon=True).start()
        return begun

    def receive(self, sent: Sent) -> Tensor:
        """The next bucket's bytes; errors as for `send`."""
        flat = torch.empty(sent.size, dtype=torch.uint8, device=self._device)
        self.send(flat)
        return flat

    def close(self) -> None:
        """Give up what is under way, for good. Does not wait for the group's end, which may take as
        long as its peers let it."""
        if self._group is not None:
            last, self._group = [self._group], None
            threading.Thread(target=_end, args=(last,), name="keel-close", daemon=True).start()


def _end(last: list[Any]) -> None:
    """Takes over the last reference to a group: its destructor may take long too."""
    group = last.pop()
    with suppress(RuntimeError):  # it is broken already
        group.abort()


@contextmanager
def unwatched() -> Iterator[None]:
    """A `ProcessGroupNCCL` that is made in here has no watchdog; groups made before or after do.

    The watchdog of a group ends its process when one of the group's operations fails, and sets a
    flag in the store for which all trainer ranks end theirs: an engine that breaks off would take
    the trainer with it. PyTorch starts none where this variable is set, which a group reads once,
    when it is made; `is_completed` and `wait` notice failures by themselves.
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
    """A buffer on a GPU that one process writes bucket after bucket to, and another one reads."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._handle: tuple[Any, ...] = ()

    def write(self, flat: Tensor) -> Shared:
        """Over the last bucket, which must have been read."""
        size = flat.numel()
        if self._buffer.numel() < size:
            self._buffer = torch.empty_like(flat)
            _, self._handle = reduce_tensor(self._buffer)
        self._buffer[:size].copy_(flat)
        torch.cuda.current_stream(flat.device).synchronize()
        return Shared(self._handle, size)


class SharedView:
    """The reader's end of a `SharedMemory`."""

    def __init__(self) -> None:
        self._handle: tuple[Any, ...] = ()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self, shared: Shared, device: torch.device) -> Tensor:
        """The bytes themselves, until the next bucket is written over them."""
        if shared.handle != self._handle:
            handle = on_device(shared.handle, device.index)  # the owner's number is not ours
            self._handle, self._buffer = shared.handle, rebuild_cuda_tensor(*handle)
        return self._buffer[: shared.size]


def gpu_id(device: torch.device) -> str:
    """Tells GPUs apart whatever CUDA_VISIBLE_DEVICES says; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
