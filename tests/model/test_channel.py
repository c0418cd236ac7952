"""Two ends of a channel, as threads of one process: gloo needs no more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from model.channel import Channel, Meeting
from model.weights import Checksum, Sent, pack_blocks, unpack_block

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def meeting() -> Iterator[Meeting]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield "127.0.0.1", store.port


@pytest.fixture
def side() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def open_all(
    side: ThreadPoolExecutor, meeting: Meeting, name: str, *, size: int = 2, deadline_s: float = 10
) -> list[Channel]:
    def end(rank: int) -> Channel:
        return Channel(meeting, name, rank=rank, size=size, device=CPU, deadline_s=deadline_s)

    return list(side.map(end, range(size)))


def test_blocks_arrive_whole_at_every_worker_of_an_engine(
    side: ThreadPoolExecutor, meeting: Meeting
) -> None:
    sender, *workers = open_all(side, meeting, "whole", size=3)
    tensors = [(str(i), torch.randn(50, i + 1)) for i in range(7)]
    sums = [Checksum() for _ in range(3)]
    for entries, block in pack_blocks(tensors, 1500):
        arriving = [side.submit(worker.receive, Sent(block.numel())) for worker in workers]
        sender.send(block)
        copies = [arrived.result(timeout=10) for arrived in arriving]
        for total, copy in zip(sums, [block, *copies], strict=True):
            total.add(copy)
        for name, tensor in unpack_block(entries, copies[1]):
            assert torch.equal(tensor, dict(tensors)[name])
    assert sums[0].value() == sums[1].value() == sums[2].value() != Checksum().value()
    assert sender.used


def test_a_checksum_notes_a_changed_byte_and_a_changed_order() -> None:
    blocks = [torch.arange(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)]

    def total(blocks: list[torch.Tensor]) -> int:
        checksum = Checksum()
        for block in blocks:
            checksum.add(block)
        return checksum.value()

    changed = blocks[0].clone()
    changed[5] += 1
    assert len({total(blocks), total(blocks[::-1]), total([changed, blocks[1]])}) == 3


def test_nobody_at_the_other_end(side: ThreadPoolExecutor, meeting: Meeting) -> None:
    sender, _ = open_all(side, meeting, "nobody", deadline_s=0.5)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.5 s .*update_deadline_s"):
        # More than fits into a socket's buffers.
        sender.send(torch.zeros(2**26, dtype=torch.uint8))
    assert time.monotonic() - began < 5
    assert not sender.used


def test_news_of_the_other_end_end_the_waiting(side: ThreadPoolExecutor, meeting: Meeting) -> None:
    sender, _ = open_all(side, meeting, "news", deadline_s=2)  # gloo's own end takes as long

    def gone() -> None:
        raise ConnectionError("the engine has died")

    began = time.monotonic()
    with pytest.raises(ConnectionError, match="has died"):
        sender.send(torch.zeros(2**26, dtype=torch.uint8), gone)
    assert time.monotonic() - began < 1.5
