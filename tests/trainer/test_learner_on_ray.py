"""The driver's side of the trainer, on Ray: two ranks of a tiny model."""

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file

from keel.configs.schema import Config
from keel.rl.metrics import values
from keel.trainer.learner import Learner
from keel.trainer.run.checkpoint import SaveError
from keel.trainer.run.manifest import find_damage, sizes, write_manifest
from tests.buckets import unpack_bucket
from tests.trainer.engine.batches import Rollouts, write_model
from tests.trainer.engine.scenarios import TIGHT, make_config
from tests.waiting import PATIENCE_S, start_local_ray

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_ray_workers")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    start_local_ray(num_cpus=1, num_gpus=0)
    yield folder
    ray.shutdown()


def start(model: Path, config: Config) -> Learner:
    learner = Learner(str(model), config, gpu=False, actor_options=lambda rank: {"num_cpus": 0})
    learner.start()
    return learner


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    buckets = ray.get(learner.put_weights(), timeout=PATIENCE_S)
    return {name: tensor for bucket in buckets for name, tensor in unpack_bucket(bucket)}


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_run_save_resume_and_lost_rank(model: Path, tmp_path: Path) -> None:
    config = make_config(2, 1, tokens=TIGHT)
    config = replace(config, algorithm=replace(config.algorithm, updates_per_batch=2))
    first = start(model, config)
    assert first.version == 0
    same(weights(first), load_file(model / "model.safetensors"))

    groups = Rollouts(0, windows=7).groups(4, 3)  # more than a micro-batch holds
    result = first.step(groups)
    assert result.version == first.version == 2
    metrics = values(result.metrics)
    tokens = sum(t.total_tokens for group in groups for t in group.group.trajectories)
    assert metrics["train/tokens"] == tokens
    assert metrics["lr"] == 5e-3
    sampled = sum(t.sampled_tokens for group in groups[:2] for t in group.group.trajectories)
    assert result.metrics["mismatch/kl"].count == sampled, "of the first update only"

    saved, exported = tmp_path / "saved", tmp_path / "exported"
    saved.mkdir()
    sealed = first.save(saved)
    assert sorted(sealed) == [*sizes(saved)], "each rank has digested its own"
    for rank in (0, 1):
        assert {f"random_rank_{rank}.pt", f"optimizer/rank_{rank}.safetensors"} <= sealed.keys()
    write_manifest(saved, sealed)
    assert find_damage(saved, extra=True) == []
    assert sorted(first.export(exported)) == [*sizes(exported)]
    same(weights(first), load_file(exported / "model.safetensors"))
    full = tmp_path / "full"
    (full / "optimizer" / "rank_1.safetensors").mkdir(parents=True)
    with pytest.raises(SaveError, match=r"^trainer rank 1: .*Is a directory: '.*/rank_1\.safe"):
        first.save(full)
    first.step(groups)
    straight = weights(first)

    # trainer/engine/test_engine.py and e2e/test_command.py resume in other processes.
    first.load(saved)
    assert first.version == 2
    first.step(groups)
    same(weights(first), straight)

    # Huge rewards overflow the gradient norm in float32.
    huge = [replace(g, advantages_G=g.advantages_G * np.float32(1e37)) for g in groups]
    first_skipped, last = first.step(huge), first.step(huge)
    assert values(first_skipped.metrics)["train/skipped_steps"] == 2
    assert first_skipped.findings and not first_skipped.gave_up
    assert all(re.match(r"p\d, completion \d.* token \d+ ", f) for f in first_skipped.findings)
    assert "3 optimizer steps in a row" in last.gave_up
    assert last.version == first.version == 4 + 2 + 1
    same(weights(first), straight)

    victim = first._ranks.locations[1]
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"trainer rank 1 died during packing") as info:
        first.step(groups)
    assert f"process {victim.pid}" in str(info.value)
    first.shutdown()
    first.shutdown()
