"""Blocks of bytes straight from a trainer's rank to one engine: NCCL between GPUs, gloo else.

A channel is a process group of its own, beside those that the trainer and the engine have, so that
an engine which dies ends its own channel and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from model.weights import Sent, Shared

POLL_S = 2e-4
NEVER = timedelta(days=1)
"""For PyTorch's own watchdog, which would end the whole process."""

Meeting = tuple[str, int]
"""Host and port of the store that the two ends meet at."""


class Channel:
    """Rank 0 sends; ranks 1 … are those of the engine."""

    def __init__(
        self,
        meeting: Meeting,
        name: str,
        *,
        rank: int,
        size: int,
        device: torch.device,
        deadline_s: float,
    ) -> None:
        """`name` is the same on all ranks and belongs to this channel alone."""
        self._device, self._deadline_s = device, deadline_s
        self.used = False
        """Whether anything got through yet."""
        deadline = timedelta(seconds=deadline_s)
        store: Any = dist.PrefixStore(  # pyright: ignore[reportPrivateImportUsage]
            name,
            dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                *meeting, is_master=False, wait_for_workers=False, timeout=deadline
            ),
        )
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = NEVER
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, deadline)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0

    def send(self, block: Tensor, check: Callable[[], None] = lambda: None) -> None:
        """Returns when the bytes have left. `check` is called while waiting, to raise if the other
        end has gone. Raises TimeoutError after the deadline; the channel is then closed."""
        end = time.monotonic() + self._deadline_s
        late = TimeoutError(
            f"{block.numel() / 2**20:.0f} MiB of weights did not get through in "
            f"{self._deadline_s:g} s (rollout.update_deadline_s) over {self._group.name()}"
        )

        def wait_for(done: Callable[[], bool]) -> None:
            while not done():
                check()
                if time.monotonic() > end:
                    raise late
                time.sleep(POLL_S)

        begun = self._begin(block)
        wait_for(begun.done)  # NCCL meets the other end here, and does not give up by itself
        try:
            work = begun.result()
            wait_for(work.is_completed)
            work.wait()  # raises if it failed; orders what follows after it
        except BaseException as error:
            self.close()
            # gloo has the same deadline, and says so in its own words.
            if isinstance(error, RuntimeError) and time.monotonic() > end - 0.1 * self._deadline_s:
                raise late from error
            raise
        self.used = True

    def _begin(self, block: Tensor) -> Future[Any]:
        """The broadcast, given to the group: the first time by a thread that may never return."""
        begun: Future[Any] = Future()
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        inference = torch.is_inference_mode_enabled()

        def begin() -> None:
            try:
                with torch.cuda.stream(stream), torch.inference_mode(inference):
                    begun.set_result(self._group.broadcast([block], self._options))
            except Exception as error:  # belongs to who waits
                begun.set_exception(error)

        if self.used:
            begin()
        else:
            threading.Thread(target=begin, name="keel-channel", daemon=True).start()
        return begun

    def receive(self, sent: Sent) -> Tensor:
        """The next block; errors as for `send`."""
        block = torch.empty(sent.size, dtype=torch.uint8, device=self._device)
        self.send(block)
        return block

    def close(self) -> None:
        """Give up what is under way."""
        self._group.abort()


def share(block: Tensor) -> Shared:
    """Let another process on the same GPU read `block`, which must stay until it has."""
    torch.cuda.current_stream().synchronize()
    _, handle = reduce_tensor(block)
    return Shared(handle)


def open_shared(shared: Shared, device: torch.device) -> Tensor:
    """A copy of the block, so that its owner may have it back."""
    handle = list(shared.handle)
    handle[6] = device.index  # the owner's number of the GPU is not ours
    copy = rebuild_cuda_tensor(*handle).clone()
    torch.cuda.current_stream().synchronize()
    return copy


def gpu_id(device: torch.device) -> str:
    """Tells GPUs apart whatever CUDA_VISIBLE_DEVICES says; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
