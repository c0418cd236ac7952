"""The trainer's side of a weight update. Each rank sends the current weights to its engines, bucket
by bucket.

If an engine shares the rank's GPU, the bytes stay on that GPU. Otherwise they are sent through a
channel. Each bucket is announced through the control channel. A single call to the engine's actor
runs for the whole update, and reports an error if the engine fails. If one engine fails, the
updates of the others continue.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch
from ray.exceptions import GetTimeoutError, RayTaskError

from keel.model import ray_timeouts
from keel.weights.buckets import Bucket, ChannelData, Checksum, FlatBucket
from keel.weights.channel import Begin, Channel, Finish, Mailbox, Rendezvous, SharedMemory, gpu_id
from keel.weights.sync import Outcome, Receiver

GRACE_S = 5.0
"""Seconds to wait, after a channel breaks, for the engine to report an error."""


@dataclass(frozen=True, slots=True)
class _EngineLink:
    actor_hash: int
    """Used to detect that the engine was replaced. Storing the actor handle would keep the actor
    alive."""
    outbox: Mailbox
    channel: Channel | None
    """None if the engine and the rank share a GPU."""

    def close(self) -> None:
        self.outbox.close()
        if self.channel is not None:
            self.channel.close()


class Sender:
    """Sends weights from one rank to its engines."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device, *, timeout_s: float) -> None:
        """Create the sender of a rank. `timeout_s` is the time limit for each step of an update."""
        self._rendezvous, self._device, self._timeout_s = rendezvous, device, timeout_s
        self._links: dict[int, _EngineLink] = {}
        """The links to the engines, by engine index."""
        self._reached = False
        """True once any channel has worked."""

    def send(
        self, buckets: Iterator[FlatBucket], receivers: Sequence[Receiver], version: int
    ) -> dict[int, Outcome]:
        """Send the weights of this `version` to all `receivers`. Returns the outcome for each
        engine index. `buckets` is always read to the end, because under ZeRO-3 the other ranks take
        part in gathering every bucket."""
        updates = [_Update(receiver) for receiver in receivers]
        checksum, begun = Checksum(), False
        for bucket in buckets:
            if not begun:  # by now the rank has freed memory for an engine that wakes up
                for update in updates:
                    update.attempt(
                        lambda update=update: update.begin(self._link_to(update.receiver))
                    )
                    update.first = not self._reached
                begun = True
            if updates:
                checksum.add(bucket[1])
            for update in updates:
                update.attempt(lambda update=update, bucket=bucket: update.send(bucket))
            self._reached |= any(update.sent for update in updates)
            del bucket  # frees memory for the next one
        total = checksum.value()
        for update in updates:
            update.attempt(lambda update=update: update.finish(version, total))
        for update in updates:
            if update.error is not None:
                self._unlink(update.receiver.index)
        return {update.receiver.index: update.error or version for update in updates}

    def _link_to(self, receiver: Receiver) -> _EngineLink:
        index = receiver.index
        if index in self._links and self._links[index].actor_hash != hash(receiver.actor):
            self._unlink(index)
        if index not in self._links:
            self._links[index] = self._open(receiver.actor)
        return self._links[index]

    def _unlink(self, index: int) -> None:
        link = self._links.pop(index, None)
        if link is not None:
            link.close()

    def _open(self, actor: Any) -> _EngineLink:
        gpus: list[str] = self._get(ray_timeouts.call(actor.gpus), "an engine to report its GPUs")
        shared = gpus == [gpu_id(self._device)] != [""]
        name = uuid4().hex  # the store keeps the addresses of earlier links under their names
        joined = ray_timeouts.call(actor.join, self._rendezvous, name, shared)
        channel: Channel | None = None
        try:
            if not shared:
                channel = Channel(
                    self._rendezvous,
                    name,
                    rank=0,
                    size=1 + len(gpus),
                    device=self._device,
                    timeout_s=self._timeout_s,
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
        outbox = Mailbox(self._rendezvous, name, timeout_s=self._timeout_s)
        return _EngineLink(hash(actor), outbox, channel)

    def _get(self, answer: Any, what: str) -> Any:
        try:
            return ray_timeouts.get(answer, seconds=self._timeout_s)
        except GetTimeoutError as error:
            late = f"waited {self._timeout_s:g} s (rollout.update_timeout_s) for {what}"
            raise TimeoutError(late) from error


class _Update:
    """The update of one engine. After an error, nothing more is sent to this engine."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.error: Exception | None = None
        self.first = False
        """True if no channel to any engine has worked yet."""
        self.sent = False
        """True once a bucket was sent through the channel successfully."""
        self._sending = False
        self._link: _EngineLink | None = None
        self._memory = SharedMemory()
        self._receiving: Any = None
        """The pending call to the engine's actor."""

    def attempt(self, act: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            act()
        except Exception as error:  # the other engines continue
            cause = error.cause if isinstance(error, RayTaskError) else None
            self.error = cause if isinstance(cause, Exception) else error
            if isinstance(self.error, ConnectionError):
                # Either end may have noticed; the other may be gone before Ray knows.
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
            self._memory = SharedMemory()

    def begin(self, link: _EngineLink) -> None:
        self._link = link
        self._receiving = ray_timeouts.call(self.receiver.actor.receive)
        link.outbox.put(Begin())

    def send(self, bucket: FlatBucket) -> None:
        """Send a bucket, and return once the engine has its bytes. The engine loads them while the
        next bucket is packed."""
        assert self._link is not None
        outbox, channel, (entries, flat) = self._link.outbox, self._link.channel, bucket
        outbox.wait(self._check)
        if channel is None:
            outbox.put(Bucket(entries=entries, data=self._memory.write(flat)))
            return
        outbox.put(Bucket(entries=entries, data=ChannelData(flat.numel())))
        self._sending = True
        try:
            channel.send(flat, self._check)
        except ConnectionError:
            _raise_failure(self._receiving)
            raise
        self._sending, self.sent = False, True

    def finish(self, version: int, checksum: int) -> None:
        assert self._link is not None
        self._link.outbox.wait(self._check)
        self._link.outbox.put(Finish(version, checksum))
        self._link.outbox.wait(self._check)

    def _check(self) -> None:
        _raise_failure(self._receiving, wait_s=0)


def _drop_frames(error: BaseException | None) -> None:
    # Frames in the traceback would keep buckets in GPU memory.
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _raise_failure(answer: Any, wait_s: float | None = None) -> None:
    """Raise the error from the call to the engine, if there is one. It is more informative than the
    error of a broken channel. Waits `wait_s` seconds for it, by default `GRACE_S`."""
    ready, _ = ray_timeouts.wait([answer], seconds=GRACE_S if wait_s is None else wait_s)
    if ready:
        ray_timeouts.get(answer, seconds=ray_timeouts.CALL_S)
