"""An engine that gives its GPU's memory up and takes it again, held to transformers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.marks import GPU
from tests.gpu.test_recorders_native import BLOCKS, EXACT
from tests.rollout.recording.reference import Reference, Tolerance, check_groups
from tests.rollout.remote_engine import TRUNCATED, engine_spec, prompts, running_engine
from tests.rollout.tiny_model import checkpoint_tensors, make_model, perturbed

pytestmark = GPU
TOLERANCE = Tolerance(logp=1e-3, tie=1e-4, rare=1e-2)
CACHE = 40 * 16 * 2048
"""Bytes of keys and values: 2 KiB a token."""


def free() -> int:
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("recorder", ["native", "packed"])
def test_it_wakes_with_the_sent_weights(tmp_path: Path, recorder: str) -> None:
    reference = Reference(make_model(tmp_path))
    spec = engine_spec(tmp_path, gpu_memory_utilization=0.1, recorder=recorder, time_share=True)
    asked = prompts(3, shared=70, own=9, tag="s")
    with running_engine(spec, gpu=True, blocks=BLOCKS, variables=EXACT) as engine:
        asleep = free()
        engine.update(0, checkpoint_tensors(reference.model))
        assert asleep - free() >= CACHE
        check_groups(engine.sample(asked, group_size=2), reference, TRUNCATED, TOLERANCE)
        for version in (1, 2):
            awake = free()  # includes compiled code and graphs
            engine.sleep()
            assert free() - awake >= CACHE
            engine.update(version, perturbed(reference.model, seed=version))
            groups = engine.sample(asked, group_size=2)
            check_groups(groups, reference, TRUNCATED, TOLERANCE)
            spans = {t.segments[0].version_T[-1] for group in groups for t in group.trajectories}
            assert spans == {version}
