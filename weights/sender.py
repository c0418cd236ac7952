"""The trainer's end of an update: the current weights, bucket by bucket, straight to the engines.

Where an engine is on the sender's own GPU the bytes stay there and a handle travels (CUDA IPC);
else they go over a channel (NCCL between GPUs, gloo between CPUs). A mailbox carries the tables of
contents, and one call of the engine's actor, which lasts as long as the update, says when it has
failed. One engine's failure is noted and the others go on.
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
from keel.weights.buckets import Bucket, Checksum, FlatBucket, Sent
from keel.weights.channel import Channel, Rendezvous, SharedMemory, gpu_id
from keel.weights.control_channel import Begin, Finish, Outbox
from keel.weights.sync import Outcome, Receiver

GRACE_S = 5.0
"""After a channel's failure: wait this long to learn whether its engine caused it."""


@dataclass(frozen=True, slots=True)
class Link:
    """To one engine, kept from update to update."""

    actor: int
    """Hash of the engine's actor, which tells it from one that took its place. The handle itself
    would keep it alive."""
    outbox: Outbox
    channel: Channel | None
    """None where engine and rank share a GPU."""

    def close(self) -> None:
        self.outbox.close()
        if self.channel is not None:
            self.channel.close()


class Sender:
    """Of one rank."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device, *, timeout_s: float) -> None:
        """`rendezvous`: a store that rank 0 keeps; `timeout_s`: for each step of an update."""
        self._rendezvous, self._device, self._timeout_s = rendezvous, device, timeout_s
        self._links: dict[int, Link] = {}
        """By the engine's index."""
        self._reached = False
        """Whether a channel has ever worked."""

    def send(
        self, buckets: Iterator[FlatBucket], receivers: Sequence[Receiver], version: int
    ) -> dict[int, Outcome]:
        """Bring `receivers` to `version`; what became of it, by their index.

        `buckets` is consumed to its end in any case: under ZeRO-3 other ranks gather along.
        """
        updates = [_Update(receiver) for receiver in receivers]
        checksum, begun = Checksum(), False
        for bucket in buckets:
            if not begun:  # what this rank holds has made way by now for an engine that wakes up
                self._begin(updates)
                begun = True
            if updates:
                checksum.add(bucket[1])
            for update in updates:
                update.attempt(lambda update=update, bucket=bucket: update.send(bucket))
            self._reached |= any(update.sent for update in updates)
            del bucket  # makes room for the next one, or for an engine that wakes up
        total = checksum.value()
        for update in updates:
            update.attempt(lambda update=update: update.finish(version, total))
        for update in updates:
            if update.error is not None:
                self._forget(update.receiver.index)
        return {update.receiver.index: update.error or version for update in updates}

    def _begin(self, updates: Sequence[_Update]) -> None:
        for update in updates:
            update.attempt(lambda update=update: update.begin(self._link(update.receiver)))
            update.first = not self._reached

    def _link(self, receiver: Receiver) -> Link:
        """Opened when an engine is first sent to."""
        index, actor = receiver.index, receiver.actor
        if index in self._links and self._links[index].actor != hash(actor):
            self._forget(index)  # the engine has been replaced
        if index not in self._links:
            self._links[index] = self._open(actor)
        return self._links[index]

    def _forget(self, index: int) -> None:
        """An engine that failed is replaced; nothing goes to it any more."""
        link = self._links.pop(index, None)
        if link is not None:
            link.close()

    def _open(self, actor: Any) -> Link:
        gpus: list[str] = self._get(
            ray_timeouts.call(actor.gpus), "an engine to say which GPUs it is on"
        )
        shares = gpus == [gpu_id(self._device)] != [""]
        # The two ends of every earlier link have left their addresses in the store, under its name.
        name = uuid4().hex
        joined = ray_timeouts.call(actor.join, self._rendezvous, name, shares)
        channel: Channel | None = None
        try:
            if not shares:
                channel = Channel(
                    self._rendezvous,
                    name,
                    rank=0,
                    size=1 + len(gpus),
                    device=self._device,
                    timeout_s=self._timeout_s,
                )
        except Exception as error:  # gloo waits here for the engine to come
            _ask(joined)
            raise TimeoutError(f"no channel to the engine: {error}") from error
        try:
            self._get(joined, f"an engine to reach the rendezvous store at {self._rendezvous}")
        except BaseException:
            if channel is not None:
                channel.close()
            raise
        return Link(hash(actor), Outbox(self._rendezvous, name, timeout_s=self._timeout_s), channel)

    def _get(self, answer: Any, what: str) -> Any:
        try:
            return ray_timeouts.get(answer, seconds=self._timeout_s)
        except GetTimeoutError as error:
            late = f"waited {self._timeout_s:g} s (rollout.update_timeout_s) for {what}"
            raise TimeoutError(late) from error


class _Update:
    """One engine's part of an update. After an error nothing more is sent."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.error: Exception | None = None
        self.first = False
        """Nothing has got through to any engine yet."""
        self.sent = False
        """Whether a bucket has got through the channel."""
        self._sending = False
        self._link: Link | None = None
        self._memory = SharedMemory()
        self._receiving: Any = None
        """The engine's part in the update, a call of its actor."""

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
            self._memory = SharedMemory()

    def begin(self, link: Link) -> None:
        self._link = link
        self._receiving = ray_timeouts.call(self.receiver.actor.receive)
        link.outbox.put(Begin())

    def send(self, bucket: FlatBucket) -> None:
        """Returns when the engine has the bytes; it loads them while the next bucket is made."""
        assert self._link is not None
        entries, flat = bucket
        outbox, channel = self._link.outbox, self._link.channel
        outbox.wait(self._check)
        if channel is None:
            outbox.put(Bucket(entries=entries, data=self._memory.write(flat)))
            return
        outbox.put(Bucket(entries=entries, data=Sent(flat.numel())))
        self._sending = True
        try:
            channel.send(flat, self._check)
        except ConnectionError:
            _ask(self._receiving)
            raise
        self._sending, self.sent = False, True

    def finish(self, version: int, checksum: int) -> None:
        assert self._link is not None
        self._link.outbox.wait(self._check)
        self._link.outbox.put(Finish(version, checksum))
        self._link.outbox.wait(self._check)

    def _check(self) -> None:
        """Raises what the engine has raised."""
        _ask(self._receiving, patience_s=0)


def _drop_frames(error: BaseException | None) -> None:
    """The frames of a traceback hold what they worked on: buckets in the GPU's memory."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _ask(answer: Any, patience_s: float | None = None) -> None:
    """Raises what an engine's call has raised, which explains more than a broken channel.
    patience_s: `GRACE_S` if None."""
    ready, _ = ray_timeouts.wait([answer], seconds=GRACE_S if patience_s is None else patience_s)
    if ready:
        ray_timeouts.get(answer, seconds=ray_timeouts.CALL_S)
