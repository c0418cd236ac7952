"""An engine on two nodes: weights, and the death of a worker."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rollout.remote_engine import OPEN, engine_spec, prompts
from tests.rollout.tiny_model import make_model, perturbed
from tests.rollout.two_nodes import engine_on_two_nodes, sample, update, workers
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e


def test_dead_worker_ends_the_engine_and_the_next_has_the_weights(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    spec = engine_spec(tmp_path, tensor_parallel=2, sampling=OPEN)
    spec = replace(spec, keep_routing=False, keep_sampling_mask=False)
    asked, said = prompts(2, shared=0, own=30, tag="n"), list[str]()
    with engine_on_two_nodes(spec) as pool:
        pool.say = said.append
        (first, near), (second, far) = workers(pool)
        assert first != second
        update(pool, 1, perturbed(model, seed=1))
        before = sample(pool, asked, spec)
        os.kill(far, signal.SIGKILL)
        after = sample(pool, asked, spec)
        assert "one of its worker processes died" in said[0]
        wait_for(lambda: not Path(f"/proc/{near}").exists(), "the end of the other worker")
    for old, new in zip(before, after, strict=True):
        for one, other in zip(old.trajectories, new.trajectories, strict=True):
            assert one.segments[0].version_T[-1] == other.segments[0].version_T[-1] == 1
            assert (one.segments[0].token_ids_T == other.segments[0].token_ids_T).all()
