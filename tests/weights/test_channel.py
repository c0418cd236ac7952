"""Two ends of a channel and of a control channel, as threads of one process with gloo."""

import inspect
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from keel.model import torch_internals
from keel.weights.channel import (
    BeginUpdate,
    Bucket,
    Channel,
    ChannelData,
    Checksum,
    FinishUpdate,
    Mailbox,
    Rendezvous,
    TensorEntry,
    attempt,
    call_workers,
    unpack_flat,
)
from tests.buckets import pack_flat
from tests.waiting import PATIENCE_S, wait_for, within_some

CPU = torch.device("cpu")


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def rendezvous(store: dist.TCPStore) -> Rendezvous:
    return "127.0.0.1", store.port


@pytest.fixture
def side() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def open_all(
    side: ThreadPoolExecutor,
    rendezvous: Rendezvous,
    name: str,
    *,
    size: int = 2,
    timeout_s: float = PATIENCE_S,
) -> list[Channel]:
    def end(rank: int) -> Channel:
        return Channel(rendezvous, name, rank=rank, size=size, device=CPU, timeout_s=timeout_s)

    return list(side.map(end, range(size)))


def nothing() -> None:
    pass


def test_buckets_reach_every_worker(side: ThreadPoolExecutor, rendezvous: Rendezvous) -> None:
    sender, *workers = open_all(side, rendezvous, "whole", size=3)
    tensors = [(str(i), torch.randn(50, i + 1)) for i in range(7)]
    sums = [Checksum() for _ in range(3)]
    for entries, flat in pack_flat(tensors, 1500):
        arriving = [side.submit(worker.receive, flat.numel()) for worker in workers]
        sender.send(flat)
        copies = [arrived.result(timeout=PATIENCE_S) for arrived in arriving]
        for total, copy in zip(sums, [flat, *copies], strict=True):
            total.add(copy)
        for name, tensor in unpack_flat(entries, copies[1]):
            assert torch.equal(tensor, dict(tensors)[name])
    assert sums[0].value() == sums[1].value() == sums[2].value() != Checksum().value()
    assert sender._used


def test_checksum_detects_bytes_and_order() -> None:
    buckets = [torch.arange(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)]

    def total(buckets: list[torch.Tensor]) -> int:
        checksum = Checksum()
        for flat in buckets:
            checksum.add(flat)
        return checksum.value()

    changed = buckets[0].clone()
    changed[5] += 1
    assert len({total(buckets), total(buckets[::-1]), total([changed, buckets[1]])}) == 3


def test_sending_without_peer_times_out(side: ThreadPoolExecutor, rendezvous: Rendezvous) -> None:
    def alone(limit_s: float) -> None:
        sender, _ = open_all(side, rendezvous, f"nobody {limit_s}", timeout_s=limit_s)
        with pytest.raises(TimeoutError, match="update_timeout_s"):
            # More than fits into a socket's buffers.
            sender.send(torch.zeros(2**26, dtype=torch.uint8))
        assert not sender._used
        with pytest.raises(ConnectionError, match="closed"):
            sender.send(torch.zeros(8, dtype=torch.uint8))

    within_some(alone, (0.2, 5.0, 60.0))


def test_failed_check_ends_sending(side: ThreadPoolExecutor, rendezvous: Rendezvous) -> None:
    def gone() -> None:
        raise ConnectionError("the engine has died")

    def told(limit_s: float) -> None:  # closing gloo takes as long
        sender, _ = open_all(side, rendezvous, f"news {limit_s}", timeout_s=limit_s)
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="has died"):
            sender.send(torch.zeros(2**26, dtype=torch.uint8), gone)
        assert time.monotonic() - began < 0.75 * limit_s

    within_some(told, (2.0, 10.0, 60.0))


def test_broken_channel_raises_connection_error(
    side: ThreadPoolExecutor, rendezvous: Rendezvous
) -> None:
    sender, worker = open_all(side, rendezvous, "broken")
    arriving = side.submit(worker.receive, 2**26)
    time.sleep(0.05)  # it has usually begun
    sender.close()
    with pytest.raises(ConnectionError, match="channel broke"):
        arriving.result(timeout=PATIENCE_S)
    for end in (sender, worker):
        with pytest.raises(ConnectionError, match="closed"):
            end.send(torch.zeros(8, dtype=torch.uint8))
        end.close()  # again


def test_closing_aborts_a_pending_broadcast(
    side: ThreadPoolExecutor, rendezvous: Rendezvous
) -> None:
    sender, _ = open_all(side, rendezvous, "begun")
    sender._timeout_s = 0.05
    met, ended = threading.Event(), list[str]()

    class Slow:
        def name(self) -> str:
            return "slow"

        def broadcast(self, *_: object) -> None:
            met.wait(PATIENCE_S)
            ended.append("begun")

        def abort(self) -> None:
            ended.append("aborted")

    sender._group = Slow()
    with pytest.raises(TimeoutError):
        sender.send(torch.zeros(8, dtype=torch.uint8))
    wait_for(lambda: ended)
    met.set()
    wait_for(lambda: len(ended) == 3)
    assert ended == ["aborted", "begun", "aborted"]


# The control channel.

ENTRIES = tuple(TensorEntry(f"layer.{i}", "bfloat16", (4,), 64 * i) for i in range(500))
OTHERS = tuple(TensorEntry(f"layer.{i}", "float32", (4, 8), 128 * i) for i in range(3))


def ends(rendezvous: Rendezvous, timeout_s: float = PATIENCE_S) -> tuple[Mailbox, Mailbox]:
    outbox, inbox = (Mailbox(rendezvous, "engine", timeout_s=timeout_s) for _ in range(2))
    return outbox, inbox


def test_messages_arrive_in_order_and_are_removed(
    store: dist.TCPStore, rendezvous: Rendezvous, side: ThreadPoolExecutor
) -> None:
    outbox, inbox = ends(rendezvous)
    update = 3 * [
        BeginUpdate(),
        *(Bucket(entries=each, data=ChannelData(192)) for each in (ENTRIES, OTHERS)),
        FinishUpdate(7, 12345),
    ]
    keys = store.num_keys()

    def take() -> list[Any]:
        taken: list[Any] = []
        for _ in update:
            taken.append(inbox.receive())
            inbox.acknowledge()
        return taken

    arriving = side.submit(take)
    for message in update:
        outbox.send(message)
        outbox.wait(nothing)
    assert arriving.result(PATIENCE_S) == update and store.num_keys() == keys


def test_next_update_may_overlap_the_last_thread(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, inbox = ends(rendezvous)
    store, taken = inbox._store, list[Any]()

    class Overtaken:
        """A store that delays this thread after each reply while others proceed."""

        def delete_key(self, key: str) -> None:
            store.delete_key(key)
            monkeypatch.setattr(inbox, "_store", store)
            outbox.wait(nothing)
            outbox.send(BeginUpdate())
            taken.append(inbox.receive())
            inbox.acknowledge()

    outbox.send(FinishUpdate(7, 12345))
    assert inbox.receive() == FinishUpdate(7, 12345)
    monkeypatch.setattr(inbox, "_store", Overtaken())
    inbox.acknowledge()
    outbox.wait(nothing)
    assert taken == [BeginUpdate()]


def test_unacknowledged_message_times_out(rendezvous: Rendezvous) -> None:
    outbox, _ = ends(rendezvous)
    outbox._timeout_s = 0.1
    outbox.send(BeginUpdate())
    with pytest.raises(TimeoutError, match=r"rollout\.update_timeout_s"):
        outbox.wait(nothing)
    outbox.close()
    assert not outbox._store.check(["0"])


def test_lost_trainer_raises_connection_error() -> None:
    held = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    _, inbox = ends(("127.0.0.1", held[0].port))
    with ThreadPoolExecutor(1) as side:
        arriving = side.submit(inbox.receive)
        time.sleep(0.05)  # it usually waits by then
        held.clear()
        with pytest.raises(ConnectionError):
            arriving.result(PATIENCE_S)


# Errors of an engine's workers.


class Worker:
    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.loaded = error, list[str]()

    def keel_load_bucket(self, bucket: str) -> None:
        if self.error is not None:
            raise self.error
        self.loaded.append(bucket)

    def keel_attempt(self, method: str, args: tuple[Any, ...]) -> Any:
        return attempt(self, method, args)


class Workers:
    """Imitates vLLM's `MultiprocExecutor`, which pickles results and errors as text."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = workers

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        try:
            return [pickle.loads(pickle.dumps(getattr(w, method)(*args))) for w in self.workers]
        except Exception as error:
            raise RuntimeError(str(error)) from None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("late"), TimeoutError),
        (ConnectionResetError("reset"), ConnectionError),
        (ValueError("no such tensor"), RuntimeError),
    ],
)
def test_channel_errors_keep_their_type(error: Exception, kind: type[Exception]) -> None:
    good = Worker()
    with pytest.raises(kind, match=str(error)) as raised:
        call_workers(Workers(good, Worker(error)), "keel_load_bucket", "a")
    assert type(raised.value) is kind and good.loaded == ["a"]


def test_shared_buckets_need_a_known_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    names = tuple(inspect.signature(torch_internals.rebuild_cuda_tensor).parameters)
    local = torch_internals.with_local_index(names, 3)
    changed = [name for name, value in zip(names, local, strict=True) if value != name]
    assert changed == ["storage_device"]
    monkeypatch.setattr(torch_internals, "rebuild_cuda_tensor", lambda device: None)
    with pytest.raises(RuntimeError, match=r"no storage_device\. Install 2\.11 to 2\.13"):
        torch_internals.with_local_index(names, 3)
