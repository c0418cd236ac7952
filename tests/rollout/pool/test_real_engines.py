"""Tests the pool with real engines in Ray actors. Covers sampling, a killed engine, cancellation
and weight updates."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import ray

from keel.rollout.pool.pool import RolloutPool
from keel.rollout.pool.ray_engines import ray_pool
from keel.weights.sync import Transfer, through_store
from tests.buckets import pack_buckets
from tests.rollout.pool.fake_engines import generate
from tests.rollout.remote_engine import engine_spec, prompts
from tests.rollout.tiny_model import checkpoint_tensors, make_model
from tests.waiting import PATIENCE_S, start_local_ray, wait_for

pytestmark = pytest.mark.e2e
START_S = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def buckets(folder: Path) -> list[Any]:
    return list(pack_buckets(checkpoint_tensors(make_model(folder)).items(), 60_000))


@pytest.fixture(scope="module")
def pool(folder: Path, buckets: list[Any]) -> Iterator[RolloutPool]:
    start_local_ray(num_cpus=2)
    spec = engine_spec(folder, engines=2, timeout_s=2 * PATIENCE_S, update_timeout_s=PATIENCE_S)
    pool = ray_pool(spec, gpu=False, startup_timeout_s=START_S)
    pool.start()
    yield pool
    pool.shutdown()
    ray.shutdown()


def stored(version: int, buckets: list[Any]) -> Transfer:
    return through_store(version, [ray.put(bucket) for bucket in buckets])


def actors(pool: RolloutPool) -> list[Any]:
    return [slot.engine.actor for slot in pool._supervisor.slots]


def stats(pool: RolloutPool, name: str) -> list[float]:
    """Return one statistic for each engine."""
    values = ray.get([actor.stats.remote() for actor in actors(pool)], timeout=PATIENCE_S)
    return [each[name] for each in values]


def all_work(pool: RolloutPool) -> None:
    """Sample until every engine has done some work. One engine may do all the work while another
    one starts late."""
    tries = count()

    def worked() -> bool:
        list(generate(pool, prompts(4, shared=0, own=9, tag=f"b{next(tries)}"), group_size=4))
        return min(stats(pool, "sampled_tokens")) > 0

    wait_for(worked, "a completion of each engine")


def test_groups_and_weights(pool: RolloutPool, buckets: list[Any]) -> None:
    groups = list(generate(pool, prompts(4, shared=0, own=9), group_size=4))
    assert sorted(group.prompt.prompt_id for group in groups) == ["p0", "p1", "p2", "p3"]
    (segment,) = groups[0].trajectories[0].segments
    assert segment.routes_TLK is not None and segment.sampling_mask is not None
    assert not segment.routes_TLK.flags.writeable  # read in place from the object store
    all_work(pool)
    pool.update(2, stored(2, buckets)).result(timeout=2 * PATIENCE_S)
    (group,) = generate(pool, prompts(1, shared=0, own=9), group_size=2)
    assert {t.segments[0].version_T[-1] for t in group.trajectories} == {2}


def test_killed_engines_are_replaced(pool: RolloutPool, buckets: list[Any]) -> None:
    pool.update(3, stored(3, buckets)).result(timeout=2 * PATIENCE_S)
    victim = ray.get(actors(pool)[0].ready.remote(), timeout=PATIENCE_S).pid
    groups = generate(pool, prompts(12, shared=0, own=60, tag="k"), group_size=4)
    first = next(groups)
    os.kill(victim, signal.SIGKILL)
    rest = list(groups)
    assert len({group.prompt.prompt_id for group in (first, *rest)}) == 12
    assert all(len(group.trajectories) == 4 for group in (first, *rest))
    pool.update(4, stored(4, buckets)).result(
        timeout=START_S
    )  # done when those that are there have them
    assert pool.restarts == 1
    assert ray.get(actors(pool)[0].ready.remote(), timeout=START_S).pid != victim
    wait_for(lambda: stats(pool, "version") == [4, 4], "the weights in the new engine")
