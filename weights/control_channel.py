"""Sends messages from a trainer rank to an engine during a weight update. The engine acknowledges
each message.

Messages go through the rendezvous store, which takes a fraction of a millisecond, while an actor
call takes several milliseconds. The bytes of the weights go through `keel.weights.channel`.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from keel.weights.buckets import Bucket, TensorEntry
from keel.weights.channel import CHECK_S, Rendezvous, connect

POLL_S = 1e-4


@dataclass(frozen=True, slots=True)
class Begin:
    """Asks the engine to pause sampling. The engine acknowledges this once it has paused."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Says that all weights have been sent and that the engine should now sample from `version`."""

    version: int
    checksum: int


Message = Begin | Bucket | Finish


class _Mailbox:
    def __init__(self, rendezvous: Rendezvous, name: str, *, timeout_s: float) -> None:
        """`name` must be unique and the same at both ends. `timeout_s` applies to each message."""
        self._store = connect(rendezvous, f"{name}/mailbox", timeout_s)
        self._timeout_s = timeout_s
        self._acknowledged = 0
        self._tables: dict[str, tuple[TensorEntry, ...]] = {}
        """The tables of tensors that have been sent before, keyed by the name of their first
        tensor."""

    @property
    def _key(self) -> str:
        return str(self._acknowledged)


class Outbox(_Mailbox):
    """The sender's end of the control channel."""

    def put(self, message: Message) -> None:
        """Send a message. Call `wait` before sending another one."""
        entries: tuple[TensorEntry, ...] = ()
        if isinstance(message, Bucket):
            entries = message.entries
            if self._tables.get(entries[0].name) is entries:  # the engine has it, too
                message = Bucket(entries=entries[:1], data=message.data)
            self._tables[entries[0].name] = entries
        self._store.set(self._key, pickle.dumps((len(entries), message), pickle.HIGHEST_PROTOCOL))

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until the engine has acknowledged the last message.

        `check` is called now and then and should raise an error if the engine has failed. Raises
        TimeoutError.
        """
        now = time.monotonic()
        end, next_check = now + self._timeout_s, now + CHECK_S
        while self._store.check([self._key]):
            now = time.monotonic()
            if now > next_check:
                check()
                next_check = time.monotonic() + CHECK_S
            if now > end:
                raise TimeoutError(
                    f"waited {self._timeout_s:g} s (rollout.update_timeout_s) for the engine to "
                    "take weights"
                )
            time.sleep(POLL_S)
        self._acknowledged += 1

    def close(self) -> None:
        """Delete the last message from the store."""
        self._store.delete_key(self._key)


class Inbox(_Mailbox):
    """The engine's end of the control channel."""

    def next(self) -> Message:
        """Wait for the next message and return it. Raises TimeoutError, and ConnectionError if the
        store has gone down with the trainer."""
        try:
            count, message = pickle.loads(self._store.get(self._key))
        except dist.DistNetworkError as error:
            raise ConnectionError(f"the trainer is gone during an update: {error}") from error
        except dist.DistStoreError as error:
            late = f"waited {self._timeout_s:g} s for the trainer to send weights"
            raise TimeoutError(late) from error
        if isinstance(message, Bucket):
            name = message.entries[0].name
            if len(message.entries) < count:
                message = Bucket(entries=self._tables[name], data=message.data)
            self._tables[name] = message.entries
        return message

    def taken(self) -> None:
        """Acknowledge the last message."""
        key = self._key
        self._acknowledged += 1  # before the key goes: the sender may then put the next message
        self._store.delete_key(key)
