"""Compares recordings of a hybrid mixture of experts on a CPU to the float32 reference."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rollout.recording.contract import Conversations, RecorderContract, Rig
from tests.rollout.recording.reference import Reference, Tolerance
from tests.rollout.remote_engine import engine_spec, prompts, running_engine
from tests.rollout.tiny_model import make_model

pytestmark = pytest.mark.e2e

CACHE_GIB = 0.0011
"""For recurrent states and keys, so few that sequences are preempted."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("model")
    reference = Reference(make_model(folder, family="qwen3_next"))
    with running_engine(engine_spec(folder, kv_cache_gib=CACHE_GIB), gpu=False) as engine:
        # The delta rule amplifies rounding: most differences are below 1e-4.
        yield Rig(engine, reference, Tolerance(logp=5e-3, tie=1e-4), engine)


class TestHybrid:
    """Runs the tests of what recurrent states change."""

    test_chunks = RecorderContract.test_chunked_prefill
    test_preemption = RecorderContract.test_preemption
    test_turns = RecorderContract.test_turns_across_weight_updates
    test_update_during_sampling = RecorderContract.test_weight_update_during_sampling
    test_update = RecorderContract.test_weight_update

    def test_prefix_cache(self, rig: Rig) -> None:
        play = Conversations(3, own=40, tag="a")
        for _ in range(3):
            play.take(rig.engine.sample_items(play.ask()))
        assert sum(result.cached_tokens for result in play.results) > 0
        play.check(rig)


def test_small_heads_work_in_bfloat16(tmp_path: Path) -> None:
    make_model(tmp_path, family="qwen3_next")
    spec = replace(engine_spec(tmp_path, kv_cache_gib=CACHE_GIB), dtype="bfloat16")
    with running_engine(spec, gpu=False) as engine:
        (group,) = engine.sample(prompts(1, shared=0, own=60), group_size=2)
    assert len(group.trajectories) == 2
