"""The trainer's side of a weight update. Each rank sends the current weights to its engines, bucket
by bucket. If an engine shares the rank's GPU, the bytes stay on that GPU. Otherwise they are sent
through a channel. Each bucket is announced through the control channel. A single call to the
engine's actor runs for the whole update, and reports an error if the engine fails. If one engine
fails, the updates of the others continue."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Link:
    """The connection to one engine."""

    actor_hash: int
    """Used to detect that the engine was replaced. Storing the actor handle would keep the actor
    alive."""
    mailbox: Mailbox
    channel: Channel | None
    """None if the engine and the rank share a GPU."""
    memory: SharedMemory = field(default_factory=SharedMemory)
    receiving: Any = None
    """The pending call to the engine's actor."""
    sending: bool = False
    """True while a bucket is being sent through the channel. It stays True if sending fails."""
    reached: bool = False
    """True once a bucket was sent through the channel successfully."""

    def send(self, bucket: FlatBucket) -> None:
        """Send a bucket, and return once the engine has its bytes. The engine loads them while the
        next bucket is packed."""
        entries, flat = bucket
        self.mailbox.wait(self._check)
        if self.channel is None:
            self.mailbox.put(Bucket(entries=entries, data=self.memory.write(flat)))
            return
        self.mailbox.put(Bucket(entries=entries, data=ChannelData(flat.numel())))
        self.sending = True
        try:
            self.channel.send(flat, self._check)
        except ConnectionError:
            _raise_failure(self.receiving)
            raise
        self.sending, self.reached = False, True

    def finish(self, version: int, checksum: int) -> None:
        self.mailbox.wait(self._check)
        self.mailbox.put(Finish(version, checksum))
        self.mailbox.wait(self._check)
        self.memory = SharedMemory()

    def _check(self) -> None:
        _raise_failure(self.receiving, wait_s=0)

    def close(self) -> None:
        self.mailbox.close()
        if self.channel is not None:
            self.channel.close()


class Sender:
    """Sends weights from one rank to its engines."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device, *, timeout_s: float) -> None:
        """Create the sender of a rank. `timeout_s` is the time limit for each step of an update."""
        self._rendezvous, self._device, self._timeout_s = rendezvous, device, timeout_s
        self._links: dict[int, _Link] = {}
        """The links to the engines, by engine index."""
        self._reached = False
        """True once any channel has worked."""

    def send(
        self, buckets: Iterator[FlatBucket], receivers: Sequence[Receiver], version: int
    ) -> dict[int, Outcome]:
        """Send the weights of this `version` to all `receivers`. Returns the outcome for each
        engine, keyed by engine index. `buckets` is always read to the end, because under ZeRO-3 the
        other ranks take part in gathering every bucket."""
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
        """Close the link to an engine and return the error that ended its update. `first` is set if
        no channel to any engine had worked before."""
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
            _drop_frames(each)
        return failure

    def _begin(self, receiver: Receiver) -> None:
        index, actor = receiver.index, receiver.actor
        if index in self._links and self._links[index].actor_hash != hash(actor):
            self._unlink(index)
        if index not in self._links:
            self._links[index] = self._open(actor)
        link = self._links[index]
        link.receiving = ray_timeouts.call(actor.receive)
        link.mailbox.put(Begin())

    def _unlink(self, index: int) -> None:
        if (link := self._links.pop(index, None)) is not None:
            link.close()

    def _open(self, actor: Any) -> _Link:
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
        mailbox = Mailbox(self._rendezvous, name, timeout_s=self._timeout_s)
        return _Link(hash(actor), mailbox, channel)

    def _get(self, answer: Any, what: str) -> Any:
        try:
            return ray_timeouts.get(answer, seconds=self._timeout_s)
        except GetTimeoutError as error:
            late = f"waited {self._timeout_s:g} s (rollout.update_timeout_s) for {what}"
            raise TimeoutError(late) from error


def _drop_frames(error: BaseException | None) -> None:
    # Frames in the traceback would keep buckets in GPU memory.
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _raise_failure(answer: Any, wait_s: float | None = None) -> None:
    """Raise the error from the call to the engine, if it has failed. This error is more informative
    than that of a broken channel. Waits `wait_s` seconds for it, or `GRACE_S` if that is None."""
    ready, _ = ray_timeouts.wait([answer], seconds=GRACE_S if wait_s is None else wait_s)
    if ready:
        ray_timeouts.get(answer, seconds=ray_timeouts.CALL_S)
