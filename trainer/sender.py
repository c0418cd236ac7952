"""The trainer's end of an update: the current weights, block by block, straight to the engines.

Where an engine is on the sender's own GPU the bytes stay where they are and a handle travels (CUDA
IPC); else they go over a channel (NCCL between GPUs, gloo between CPUs). Ray's calls carry the
tables of contents, and say when an engine has died. One engine's failure is noted and the others
go on.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayTaskError
from torch import Tensor

from model.channel import Channel, Meeting, gpu_id, share
from model.weights import Block, Bucket, Checksum, Sent
from trainer.worker import Outcome, Receiver

GRACE_S = 5.0
"""After a channel's failure: wait this long to learn whether its engine caused it."""


class Sender:
    """Of one rank. Keeps its channels from update to update."""

    def __init__(self, meeting: Meeting, device: torch.device, *, deadline_s: float) -> None:
        """`meeting`: a store that rank 0 keeps; `deadline_s`: for each step of an update."""
        self._meeting, self._device, self._deadline_s = meeting, device, deadline_s
        self._channels: dict[int, tuple[str, Channel | None]] = {}
        """By the engine's index, with its actor's id; None where engine and rank share a GPU."""
        self._opened = itertools.count()
        self._reached = False
        """Whether a channel has ever worked."""

    def send(
        self, blocks: Iterator[Block], receivers: Sequence[Receiver], version: int
    ) -> dict[int, Outcome]:
        """Bring `receivers` to `version`; what became of it, by their index.

        `blocks` is drawn to its end in any case: under ZeRO-3 other ranks gather along.
        """
        updates = [_Update(receiver, self._deadline_s) for receiver in receivers]
        for update in updates:
            update.attempt(lambda update=update: update.begin(self._channel(update.receiver)))
            update.first = not self._reached
        checksum = Checksum()
        for block in blocks:
            if updates:
                checksum.add(block[1])
            for update in updates:
                update.attempt(lambda update=update, block=block: update.send(block))
            self._reached |= any(update.sent for update in updates)
        total = checksum.value()
        for update in updates:
            update.attempt(lambda update=update: update.finish(version, total))
        for update in updates:
            if update.error is not None:
                self._forget(update.receiver.index)
        return {update.receiver.index: update.error or version for update in updates}

    def _channel(self, receiver: Receiver) -> Channel | None:
        """Opened when an engine is first sent to."""
        index, actor = receiver.index, receiver.actor
        of, channel = self._channels.get(index, ("", None))
        if of != actor._actor_id.hex():
            self._forget(index)  # the engine has been replaced
            gpus: list[str] = ray.get(actor.gpus.remote(), timeout=self._deadline_s)
            here = gpus == [gpu_id(self._device)] != [""]
            channel = None if here else self._open(actor, workers=len(gpus))
            self._channels[index] = actor._actor_id.hex(), channel
        return channel

    def _forget(self, index: int) -> None:
        """An engine that failed is replaced; nothing goes over its channel any more."""
        _, channel = self._channels.pop(index, ("", None))
        if channel is not None:
            channel.close()

    def _open(self, actor: Any, *, workers: int) -> Channel:
        # The two ends of an earlier channel to the same engine have left their addresses in the
        # store under its name.
        name = f"{actor._actor_id.hex()}/{next(self._opened)}"
        joined = actor.join.remote(self._meeting, name)
        try:
            channel = Channel(
                self._meeting,
                name,
                rank=0,
                size=1 + workers,
                device=self._device,
                deadline_s=self._deadline_s,
            )
        except Exception as error:  # gloo waits here for the engine to come
            _ask(joined)
            raise TimeoutError(f"no channel to the engine: {error}") from error
        try:
            ray.get(joined, timeout=self._deadline_s)
        except BaseException:
            channel.close()
            raise
        return channel


class _Update:
    """One engine's part of an update. After an error nothing more is sent."""

    def __init__(self, receiver: Receiver, deadline_s: float) -> None:
        self.receiver, self._deadline_s = receiver, deadline_s
        self.error: Exception | None = None
        self.first = False
        """Nothing has got through to any engine yet."""
        self.sent = False
        """Whether a block has got through the channel."""
        self._sending = False
        self._channel: Channel | None = None
        self._asked: Any = None
        """The engine's answer to what was sent last."""
        self._block: Tensor | None = None
        """Must stay until the engine has read it."""

    def attempt(self, act: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            act()
        except Exception as error:  # whatever it is, the other engines get their weights
            cause = error.cause if isinstance(error, RayTaskError) else None
            self.error = cause if isinstance(cause, Exception) else error
            if isinstance(self.error, ConnectionError):
                # Whichever end noticed: the other may be gone, and Ray not know it yet.
                self.error = TimeoutError(str(self.error))
            unreached = self._sending and self.first and not self.sent
            if isinstance(self.error, TimeoutError) and unreached:
                self.error = RuntimeError(
                    f"engine {self.receiver.index} cannot be reached from {socket.gethostname()}: "
                    f"{self.error}. Set rollout.weight_transfer to store, or see what NCCL does "
                    "with NCCL_DEBUG=INFO; NCCL_SOCKET_IFNAME names the network interface to use"
                )
            _drop_frames(error)
            _drop_frames(self.error)
            self._block = None

    def begin(self, channel: Channel | None) -> None:
        self._channel = channel
        self._asked = self.receiver.actor.begin_update.remote()

    def send(self, block: Block) -> None:
        """Returns when the engine has the bytes; it loads them while the next block is made."""
        entries, data = block
        self._settle()
        if self._channel is None:
            bucket = Bucket(entries=entries, data=share(data))
            self._asked = self.receiver.actor.load_bucket.remote(bucket)
        else:
            bucket = Bucket(entries=entries, data=Sent(data.numel()))
            self._asked = self.receiver.actor.load_bucket.remote(bucket)
            self._sending = True
            try:
                self._channel.send(data, self._check)
            except ConnectionError:
                _ask(self._asked)
                raise
            self._sending, self.sent = False, True
        self._block = data

    def finish(self, version: int, checksum: int) -> None:
        self._settle()
        self._asked = self.receiver.actor.finish_update.remote(version, checksum)
        self._settle()
        self._block = None

    def _settle(self) -> None:
        """The engine has done what it was asked. Raises what it raised."""
        ready, _ = ray.wait([self._asked], timeout=self._deadline_s)
        if not ready:
            raise TimeoutError(f"waited {self._deadline_s:g} s for the engine to take weights")
        ray.get(self._asked, timeout=self._deadline_s)

    def _check(self) -> None:
        """Raises if the engine has failed while bytes are on their way to it."""
        _ask(self._asked, patience_s=0)


def _drop_frames(error: BaseException | None) -> None:
    """The frames of a traceback hold what they worked on: blocks of the GPU's memory."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _ask(answer: Any, patience_s: float = GRACE_S) -> None:
    """Raises what an engine's call has raised, which explains more than a broken channel."""
    ready, _ = ray.wait([answer], timeout=patience_s)
    if ready:
        ray.get(answer, timeout=GRACE_S)
