"""Two ends of a channel, as threads of one process with gloo."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from keel.weights.buckets import ChannelData, Checksum, pack_flat, unpack_flat
from keel.weights.channel import BLOCKING_WAIT, Channel, Rendezvous
from tests.waiting import PATIENCE_S, wait_for, within_some

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rendezvous() -> Iterator[Rendezvous]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield "127.0.0.1", store.port


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


def test_buckets_reach_every_worker(side: ThreadPoolExecutor, rendezvous: Rendezvous) -> None:
    sender, *workers = open_all(side, rendezvous, "whole", size=3)
    tensors = [(str(i), torch.randn(50, i + 1)) for i in range(7)]
    sums = [Checksum() for _ in range(3)]
    for entries, flat in pack_flat(tensors, 1500):
        arriving = [side.submit(worker.receive, ChannelData(flat.numel())) for worker in workers]
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
        with pytest.raises(TimeoutError, match=rf"{limit_s:g} s .*update_timeout_s"):
            # More than fits into a socket's buffers.
            sender.send(torch.zeros(2**26, dtype=torch.uint8))
        assert not sender._used

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
    arriving = side.submit(worker.receive, ChannelData(2**26))
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
    """NCCL starts once the other end connects, which may be after the deadline."""
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


@pytest.mark.parametrize("before", [None, "0"])
def test_only_channels_lack_the_watchdog(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    seen: list[str | None] = []

    class Nccl:
        class Options:
            pass

        def __init__(self, *_: object) -> None:
            seen.append(os.environ.get(BLOCKING_WAIT))
            if len(seen) > 1:
                raise ValueError("no GPUs")

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    if before is not None:
        monkeypatch.setenv(BLOCKING_WAIT, before)

    def open_one() -> Channel:
        gpu = torch.device("cuda", 0)
        return Channel(rendezvous, "gpu", rank=0, size=2, device=gpu, timeout_s=PATIENCE_S)

    open_one()
    assert os.environ.get(BLOCKING_WAIT) == before
    with pytest.raises(ValueError, match="no GPUs"):
        open_one()
    assert os.environ.get(BLOCKING_WAIT) == before
    assert seen == ["1", "1"]
