"""Two ends of a control channel, in threads of one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from keel.weights.buckets import Bucket, ChannelData, TensorEntry
from keel.weights.channel import Rendezvous
from keel.weights.control_channel import Begin, Finish, Inbox, Message, Outbox
from tests.waiting import PATIENCE_S

ENTRIES = tuple(TensorEntry(f"layer.{i}", "bfloat16", (4, 8), 64 * i) for i in range(3))
OTHERS = tuple(TensorEntry(f"layer.{i}", "float32", (4, 8), 128 * i) for i in range(3))


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def ends(store: dist.TCPStore, timeout_s: float = PATIENCE_S) -> tuple[Outbox, Inbox]:
    rendezvous: Rendezvous = ("127.0.0.1", store.port)
    return (
        Outbox(rendezvous, "engine", timeout_s=timeout_s),
        Inbox(rendezvous, "engine", timeout_s=timeout_s),
    )


def nothing() -> None:
    pass


def test_messages_arrive_in_order_and_are_removed(store: dist.TCPStore) -> None:
    outbox, inbox = ends(store)
    buckets = [
        Bucket(entries=ENTRIES, data=ChannelData(192)),
        Bucket(entries=OTHERS, data=ChannelData(384)),
    ]
    update = [Begin(), *buckets, Finish(7, 12345)]
    keys = store.num_keys()

    def take(number: int) -> list[Message]:
        taken: list[Message] = []
        for _ in range(number):
            taken.append(inbox.next())
            inbox.taken()
        return taken

    with ThreadPoolExecutor(1) as side:
        arriving = side.submit(take, 3 * len(update))
        for message in 3 * update:
            outbox.put(message)
            outbox.wait(nothing)
        assert arriving.result(PATIENCE_S) == 3 * update
    assert store.num_keys() == keys


def test_tables_travel_once(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox, inbox = ends(store)
    many = tuple(TensorEntry(f"experts.{i}.weight", "bfloat16", (4,), 64 * i) for i in range(500))
    sizes: list[int] = []
    monkeypatch.setattr(outbox, "_store", Recording(outbox._store, sizes))
    for _ in range(3):
        outbox.put(Bucket(entries=many, data=ChannelData(8)))
        assert inbox.next() == Bucket(entries=many, data=ChannelData(8))
        inbox.taken()
        outbox.wait(nothing)
    assert sizes[0] > 10_000 and max(sizes[1:]) < 1_000


class Recording:
    """A store that records the number of bytes written."""

    def __init__(self, store: dist.Store, sizes: list[int]) -> None:
        self._store, self._sizes = store, sizes

    def set(self, key: str, value: bytes) -> None:
        self._sizes.append(len(value))
        self._store.set(key, value)  # type: ignore[arg-type]

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)


def test_next_update_may_overlap_the_last_thread(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, inbox = ends(store)
    taken: list[Message] = []

    class Overtaken:
        """A store that delays this thread after each reply while others proceed."""

        def __init__(self, store: dist.Store) -> None:
            self._store = store

        def delete_key(self, key: str) -> None:
            self._store.delete_key(key)
            monkeypatch.setattr(inbox, "_store", self._store)
            outbox.wait(nothing)
            outbox.put(Begin())
            taken.append(inbox.next())
            inbox.taken()

    outbox.put(Finish(7, 12345))
    assert inbox.next() == Finish(7, 12345)
    monkeypatch.setattr(inbox, "_store", Overtaken(inbox._store))
    inbox.taken()
    outbox.wait(nothing)
    assert taken == [Begin()]


def test_unacknowledged_message_times_out(store: dist.TCPStore) -> None:
    outbox, _ = ends(store)
    outbox._timeout_s = 0.1
    outbox.put(Begin())
    with pytest.raises(TimeoutError, match=r"0\.1 s \(rollout\.update_timeout_s\)"):
        outbox.wait(nothing)
    outbox.close()
    assert not outbox._store.check(["0"])


def test_lost_trainer_raises_connection_error() -> None:
    held = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    _, inbox = ends(held[0])
    with ThreadPoolExecutor(1) as side:
        arriving = side.submit(inbox.next)
        time.sleep(0.05)  # it usually waits by then
        held.clear()
        with pytest.raises(ConnectionError, match="the trainer is gone"):
            arriving.result(PATIENCE_S)
