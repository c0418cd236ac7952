"""The trainer's sender against fake engines in Ray processes, in every failure mode."""

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rollout.engine.worker import EngineThread
from keel.weights.channel import (
    Bucket,
    Channel,
    Checksum,
    FlatBucket,
    Receiver,
    Rendezvous,
    unpack_flat,
)
from keel.weights.sender import Sender
from tests.buckets import pack_flat
from tests.waiting import PATIENCE_S, start_local_ray, within_some

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_ray_workers")]
CPU = torch.device("cpu")
WEIGHTS = {str(i): torch.full((64, 64), float(i)) for i in range(6)}
DEADLINE_S = 30.0
BUCKET_BYTES = 40_000
"""Bytes: two tensors per bucket."""


class Sampler:
    """Accepts weights like `keel.rollout.engine.vllm_engine.VllmEngine`. `trouble`: failure at its
    second bucket."""

    busy, open = False, True

    def __init__(self, trouble: str) -> None:
        self.trouble, self.weights, self.buckets = trouble, dict[str, torch.Tensor](), 0
        self.version = 0

    def gpus(self) -> list[str]:
        return [""]

    def connect(self, rendezvous: Rendezvous, name: str) -> None:
        device = torch.device("cpu")
        self.channel = Channel(
            rendezvous, name, rank=1, size=2, device=device, timeout_s=DEADLINE_S
        )

    def begin_update(self) -> list[Any]:
        self.checksum, self.began = Checksum(), time.monotonic()
        return []

    def load_bucket(self, bucket: Bucket) -> None:
        self.buckets += 1
        if self.buckets == 2 and self.trouble == "dies":
            os._exit(1)
        if self.buckets == 2 and self.trouble == "raises":
            raise ValueError("no tensor of this name")
        if self.buckets == 2 and self.trouble == "hangs up":
            self.channel.close()
        if self.trouble == "deaf":
            return
        flat = bucket.data.read(Receiver(CPU, self.channel), to_device=True, keep=True)
        if self.trouble == "flips":
            flat[0] ^= 1
        self.checksum.add(flat)
        self.weights |= {name: t.clone() for name, t in unpack_flat(bucket.entries, flat)}

    def finish_update(self, version: int, checksum: int | None) -> None:
        if checksum != self.checksum.value():
            raise RuntimeError("received other bytes than were sent")
        self.version = version


class Worker:
    def __init__(self, trouble: str = "") -> None:
        self.sampler: Any = Sampler(trouble)
        config = RolloutConfig(
            sampling=SamplingConfig(max_tokens=8), update_timeout_s=DEADLINE_S, engines=5
        )
        self.engine = EngineThread(lambda: self.sampler, config)

    def gpus(self) -> list[str]:
        return self.engine.gpus()

    def connect(self, rendezvous: Rendezvous, name: str, shares_gpu: bool) -> None:
        self.engine.connect(rendezvous, name, shares_gpu=shares_gpu)

    def update_from_rank(self) -> None:
        self.engine.update_from_rank()

    def began(self) -> float:
        return self.sampler.began

    def holds(self) -> tuple[int, float]:
        total = sum(float(tensor.sum()) for tensor in self.sampler.weights.values())
        return self.sampler.version, total


@pytest.fixture(scope="module")
def sender() -> Iterator[Callable[[float], Sender]]:
    start_local_ray(num_cpus=2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield lambda timeout_s: Sender(("127.0.0.1", store.port), CPU, timeout_s=timeout_s)
    ray.shutdown()


def engines(*troubles: str) -> dict[int, Any]:
    remote: Any = ray.remote(Worker)
    actors = [remote.options(num_cpus=0).remote(trouble) for trouble in troubles]
    ray.get([actor.gpus.remote() for actor in actors], timeout=PATIENCE_S)
    return dict(enumerate(actors))


def test_engine_begins_at_the_first_bucket(sender: Callable[[float], Sender]) -> None:
    there = engines("")
    made: list[float] = []

    def buckets() -> Iterator[FlatBucket]:
        for bucket in pack_flat(WEIGHTS.items(), BUCKET_BYTES):
            made.append(time.monotonic())
            yield bucket

    assert sender(DEADLINE_S).send(buckets(), there, 1) == {0: 1}
    began = ray.get(there[0].began.remote(), timeout=PATIENCE_S)
    # A small bucket counts as sent once in flight; the second waits until the first is loaded.
    assert len(made) > 2 and made[0] < began < made[2]


def test_one_failing_engine_does_not_stop_others(
    sender: Callable[[float], Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.weights.sender._GRACE_S", PATIENCE_S)  # Ray is slow

    def troubled(limit_s: float) -> None:
        """The disconnected engine is awaited until the timeout; the others are in time."""
        end = sender(limit_s)
        there = engines("", "dies", "raises", "flips", "hangs up")
        expected = sum(float(tensor.sum()) for tensor in WEIGHTS.values())
        buckets: list[weakref.ref[torch.Tensor]] = []

        def watched() -> Iterator[FlatBucket]:
            for entries, flat in pack_flat(WEIGHTS.items(), BUCKET_BYTES):
                buckets.append(weakref.ref(flat))
                yield entries, flat

        gc.collect()
        gc.disable()
        try:
            outcomes = end.send(watched(), there, 7)
            assert outcomes[0] == 7
            assert isinstance(outcomes[1], RayActorError)
            assert isinstance(outcomes[2], ValueError) and "no tensor" in str(outcomes[2])
            assert isinstance(outcomes[3], RuntimeError) and "other bytes" in str(outcomes[3])
            # The run replaces such an engine like a late one, and continues.
            assert isinstance(outcomes[4], TimeoutError) and "channel" in str(outcomes[4])
            # References in a traceback would keep the memory of buckets on a GPU.
            # gloo holds unsent buffers until its timeout.
            until = time.monotonic() + 10 * limit_s
            while (
                held := [1 for flat in buckets if flat() is not None]
            ) and time.monotonic() < until:
                time.sleep(0.1)
            assert len(buckets) == 3 and not held
        finally:
            gc.enable()
        assert ray.get(there[0].holds.remote(), timeout=PATIENCE_S) == (7, expected)
        assert list(end._links) == [0]

        # A new engine replaces the dead one; engine 0 keeps its link; an engine whose
        # update failed gets a new link, as the state of the old one is unknown.
        new = engines("")[0]
        kept = end._links[0]
        twice = {name: 2 * tensor for name, tensor in WEIGHTS.items()}
        takers = {0: there[0], 1: new, 2: there[2]}
        outcomes = end.send(pack_flat(twice.items(), BUCKET_BYTES), takers, 8)
        assert outcomes == {0: 8, 1: 8, 2: 8}
        held = ray.get([taker.holds.remote() for taker in takers.values()], timeout=PATIENCE_S)
        assert held == [(8, 2 * expected)] * 3
        assert end._links[0] is kept

        # Engine 0 died after its last update.
        outcomes = end.send(pack_flat(twice.items(), BUCKET_BYTES), {0: new}, 9)
        assert outcomes == {0: 9}
        assert kept.channel is not None
        with pytest.raises(ConnectionError, match="closed"):
            kept.channel.send(torch.zeros(8, dtype=torch.uint8))

    within_some(troubled, (6.0, 30.0, 60.0))


def test_engine_never_reached_is_no_timeout(sender: Callable[[float], Sender]) -> None:
    large = {"w": torch.zeros(8 << 20)}  # gloo would send small ones without a receiver

    def troubled(limit_s: float) -> None:
        end = sender(limit_s)
        outcome = end.send(pack_flat(large.items(), BUCKET_BYTES), engines("deaf"), 1)[0]
        assert isinstance(outcome, RuntimeError) and "engine 0 cannot be reached" in str(outcome)
        assert "rollout.weight_transfer" in str(outcome) and "NCCL_SOCKET_IFNAME" in str(outcome)
        both = engines("", "deaf")
        assert end.send(pack_flat(large.items(), BUCKET_BYTES), {0: both[0]}, 2) == {0: 2}
        outcomes = end.send(pack_flat(large.items(), BUCKET_BYTES), both, 3)
        assert outcomes[0] == 3 and isinstance(outcomes[1], TimeoutError)

    within_some(troubled, (3.0, 30.0))
