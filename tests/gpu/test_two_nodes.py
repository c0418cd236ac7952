"""An engine on two nodes of one GPU each, against the float32 reference."""

from pathlib import Path

import pytest
import torch

from tests.gpu.marks import GPU
from tests.gpu.test_recorders_native import EXACT, TOLERANCE
from tests.rollout.recording.reference import Reference, check_groups
from tests.rollout.remote_engine import TRUNCATED, engine_spec, prompts
from tests.rollout.tiny_model import make_model, perturbed
from tests.rollout.two_nodes import engine_on_two_nodes, sample, through_store, workers
from tests.waiting import PATIENCE_S

pytestmark = [
    *GPU,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
APART = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
"""NCCL alone: the others take two processes of one machine for two of one node."""


def test_records_before_and_after_an_update(tmp_path: Path) -> None:
    reference = Reference(make_model(tmp_path))
    options = {"tensor_parallel": 2, "enforce_eager": True, "gpu_memory_utilization": 0.1}
    spec, asked = engine_spec(tmp_path, **options), prompts(3, shared=70, own=9, tag="n")
    with engine_on_two_nodes(spec, {**EXACT, **APART}) as pool:
        assert len({node for node, _ in workers(pool)}) == 2
        check_groups(sample(pool, asked, spec), reference, TRUNCATED, TOLERANCE)
        weights = perturbed(reference.model, seed=1)
        pool.update(1, through_store(1, weights)).result(timeout=PATIENCE_S)
        groups = sample(pool, asked, spec)
        check_groups(groups, reference, TRUNCATED, TOLERANCE)
        assert {t.segments[0].version_T[-1] for g in groups for t in g.trajectories} == {1}
