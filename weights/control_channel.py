"""What a rank tells an engine during an update, and whether the engine has done it.

Messages go through the rendezvous store, which takes a fraction of a millisecond; a call of one
actor by another takes several. The bytes of weights travel otherwise
(`keel.weights.channel`).
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
    """The engine is to pause; it has when it has taken this."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Everything has been sent."""

    version: int
    checksum: int


Message = Begin | Bucket | Finish


class _End:
    def __init__(self, rendezvous: Rendezvous, name: str, *, timeout_s: float) -> None:
        """`name` is the same at both ends and belongs to this mailbox alone; `timeout_s`: for
        each message."""
        self._store, self._timeout_s = (
            connect(rendezvous, f"{name}/mailbox", timeout_s),
            timeout_s,
        )
        self._number = 0
        """Of messages that have been taken."""
        self._tables: dict[str, tuple[TensorEntry, ...]] = {}
        """Tables of contents that have travelled, by their first tensor."""

    @property
    def _key(self) -> str:
        return str(self._number)


class Outbox(_End):
    """The sender's end."""

    def put(self, message: Message) -> None:
        """The next message, once the last one has been waited for."""
        entries: tuple[TensorEntry, ...] = ()
        if isinstance(message, Bucket):
            entries = message.entries
            if self._tables.get(entries[0].name) is entries:  # the engine has it, too
                message = Bucket(entries=entries[:1], data=message.data)
            self._tables[entries[0].name] = entries
        self._store.set(self._key, pickle.dumps((len(entries), message), pickle.HIGHEST_PROTOCOL))

    def wait(self, check: Callable[[], None]) -> None:
        """Until the engine has done what it was told last. `check` is called now and then, to raise
        if it has failed. Raises TimeoutError after the deadline."""
        now = time.monotonic()
        end, look = now + self._timeout_s, now + CHECK_S
        while self._store.check([self._key]):
            now = time.monotonic()
            if now > look:
                check()
                look = time.monotonic() + CHECK_S
            if now > end:
                raise TimeoutError(
                    f"waited {self._timeout_s:g} s (rollout.update_timeout_s) for the engine to "
                    "take weights"
                )
            time.sleep(POLL_S)
        self._number += 1

    def close(self) -> None:
        """Leaves nothing in the store."""
        self._store.delete_key(self._key)


class Inbox(_End):
    """The engine's end."""

    def next(self) -> Message:
        """Waits for it. Raises TimeoutError after the deadline, ConnectionError if the store is
        gone, and with it the trainer."""
        try:
            count, message = pickle.loads(self._store.get(self._key))
        except dist.DistNetworkError as error:
            raise ConnectionError(f"the trainer has gone during an update: {error}") from error
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
        """What the last message asked for is done."""
        key = self._key
        self._number += 1  # first: once the key is gone the sender may put, and another thread take
        self._store.delete_key(key)
