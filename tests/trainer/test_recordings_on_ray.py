"""Ranks fetch recordings from the node that made them, and train without those that are lost."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.types import ScoredGroup
from keel.rollout.engine import worker
from keel.rollout.engine.worker import RolloutWorker
from keel.rollout.spec import GroupRequest
from keel.trainer.learner import Learner
from keel.trainer.run.errors import WorkerLost
from tests.buckets import unpack_bucket
from tests.rl.rollouts import as_stored, with_segments
from tests.trainer.engine.batches import Rollouts, write_model
from tests.trainer.engine.scenarios import make_config
from tests.waiting import PATIENCE_S, start_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_ray_workers")]
PROMPTS, SIZE = 4, 3
SPEC: Any = SimpleNamespace(config=RolloutConfig(), batch_invariant=False)


def groups_here() -> list[ScoredGroup]:
    return Rollouts(0, windows=1).groups(PROMPTS, SIZE)


class Sampler(RolloutWorker):
    """Stands for an engine: returns prepared groups."""

    def __init__(self, spec: Any) -> None:
        worker.STORED_BYTES = 1  # in this process
        self._groups = {scored.group.prompt.prompt_id: scored.group for scored in groups_here()}

    async def sample(self, request: Any, sampling: Any, record: bool) -> list[Any]:
        group = with_segments(self._groups[request.prompt.prompt_id], as_stored)
        return worker.detach(request, group)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    node = {"num_cpus": 1, "object_store_memory": 2**28}
    cluster = start_cluster(node, {**node, "resources": {"b": 1}})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def sampled(engine: Any, groups: list[ScoredGroup]) -> list[ScoredGroup]:
    """Sample the groups on an engine."""
    requests = [GroupRequest(scored.group.prompt, SIZE) for scored in groups]
    futures = [engine.sample(r, sampling=SamplingConfig(), record=True) for r in requests]
    found = [future.result(PATIENCE_S) for future in futures]
    assert all(
        s.routes_TLK is None for group in found for t in group.trajectories for s in t.segments
    )
    return [replace(one, group=group) for one, group in zip(groups, found, strict=True)]


def test_lost_recordings_drop_their_groups_alone(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model")
    monkeypatch.setattr(worker, "RolloutWorker", Sampler)
    stored = {"runtime_env": {"env_vars": {"RAY_max_direct_call_object_size": "1"}}, "num_cpus": 0}
    head, other = (
        worker.RayEngine(
            SPEC, 0, gpu=False, options=lambda _, node=node: {**stored, "resources": {node: 0.01}}
        )
        for node in ("node:__internal_head__", "b")
    )
    config = make_config(2, 1)
    learner = Learner(
        str(tmp_path / "model"),
        config,
        gpu=False,
        actor_options=lambda _: {"num_cpus": 0, "resources": {"node:__internal_head__": 0.01}},
    )
    learner.start()
    here = groups_here()
    learner.step(here)  # so that the checkpoint has the optimizer's state
    (tmp_path / "saved").mkdir()
    learner.save(tmp_path / "saved")

    def step(groups: list[ScoredGroup]) -> tuple[dict[str, torch.Tensor], Any]:
        learner.load(tmp_path / "saved")
        metrics = learner.step(groups).metrics
        buckets = ray.get(learner.put_weights(), timeout=PATIENCE_S)
        return {name: value for bucket in buckets for name, value in unpack_bucket(bucket)}, metrics

    (whole, metrics), (alone, _) = step(here), step(here[:2])
    moved, remote_metrics = step([*sampled(head, here[:2]), *sampled(other, here[2:])])
    assert moved.keys() == whole.keys() and remote_metrics == metrics
    assert all(torch.equal(moved[name], value) for name, value in whole.items())

    batch = [*sampled(head, here[:2]), *sampled(other, here[2:])]
    gone = sampled(other, here)
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    said = list[str]()
    learner.say = lambda kind, text: said.append(text)
    rest, metrics = step(batch)
    assert said == [
        "2 of 4 groups are left out: their recordings were lost with the node that sampled them"
    ]
    assert metrics["rollout/dropped_completions"].value == 2 * SIZE
    assert all(torch.equal(rest[name], value) for name, value in alone.items())
    with pytest.raises(WorkerLost, match="recordings were lost"):
        learner.step(gone)
    learner.shutdown()
