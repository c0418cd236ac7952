"""An engine on two nodes: its weights, and the death of a worker."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from keel.rl.types import Group
from keel.rollout.engine.worker import RolloutWorker
from keel.rollout.spec import EngineError, EngineSpec
from keel.weights.sender import Sender
from tests.rollout.remote_engine import OPEN, engine_spec, prompts
from tests.rollout.tiny_model import make_model, perturbed
from tests.rollout.two_nodes import directly, engine_on_two_nodes, sample, through_store, workers
from tests.waiting import PATIENCE_S, wait_for


@torch.no_grad()
def check_samples(groups: Sequence[Group], model: Any, *, version: int) -> None:
    """Compare the recorded log-probabilities with the ones that `model` computes."""
    for segment in (t.segments[0] for group in groups for t in group.trajectories):
        ids, sampled = torch.tensor(segment.token_ids_T).long(), segment.trainable_T[1:]
        logits = model(ids[None]).logits[0, :-1] / OPEN.temperature
        logp = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
        assert logp[sampled] == pytest.approx(segment.logp_old_T[1:][sampled], abs=1e-3)
        assert set(segment.version_T[1:][sampled]) == {version}


@pytest.mark.e2e
@pytest.mark.usefixtures("forked_ray_workers")
def test_dead_worker_ends_the_engine_and_the_next_has_the_weights(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    spec = engine_spec(tmp_path, tensor_parallel=2, sampling=OPEN)
    spec = replace(spec, keep_routing=False, keep_sampling_mask=False)
    asked, said = prompts(2, shared=0, own=30, tag="n"), list[str]()
    with engine_on_two_nodes(spec) as pool:
        pool.say = said.append
        (first, near), (second, far) = workers(pool)
        assert first != second
        pool.update(1, through_store(1, perturbed(model, seed=1))).result(timeout=PATIENCE_S)
        host = ray.util.get_node_ip_address()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        sender = Sender((host, store.port), torch.device("cpu"), timeout_s=PATIENCE_S)
        check_samples(sample(pool, asked, spec), model, version=1)
        weights = perturbed(model, seed=2)
        pool.update(2, directly(sender, 2, weights)).result(timeout=PATIENCE_S)
        check_samples(sample(pool, asked, spec), model, version=2)
        os.kill(far, signal.SIGKILL)
        check_samples(sample(pool, asked, spec), model, version=2)
        assert "one of its worker processes died" in said[0]
        wait_for(lambda: not Path(f"/proc/{near}").exists(), "the end of the other worker")


def test_error_of_a_start_is_reported_while_workers_live(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(spec: EngineSpec) -> None:
        raise ValueError("no room for keys and values")

    module = SimpleNamespace(VllmEngine=fail)
    monkeypatch.setitem(sys.modules, "keel.rollout.engine.vllm_engine", module)
    spec = engine_spec(Path("model"))
    with pytest.raises(ValueError, match="no room"):
        RolloutWorker(spec)
    with pytest.raises(EngineError, match="ValueError: no room"):
        asyncio.run(RolloutWorker(replace(spec, spread=True)).ready())
