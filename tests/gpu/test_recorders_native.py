"""GPU recorders against the float32 reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from keel.configs.schema import SamplingConfig
from tests.gpu.marks import GPU
from tests.rollout.recording.contract import RecorderContract
from tests.rollout.recording.reference import Reference, Tolerance, check_groups
from tests.rollout.remote_engine import OPEN, RemoteEngine, engine_spec, prompts, running_engine
from tests.rollout.tiny_model import make_model

pytestmark = GPU

EXACT = {"TRITON_F32_DEFAULT": "ieee"}
"""float32 products in Triton's kernels, where TF32 would turn routes."""
BLOCKS = 40
"""Of 16 tokens: a few sequences fill the cache, so that some are preempted."""


@pytest.fixture(scope="module", params=["native", "packed"])
def recorder(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, recorder: str) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(make_model(folder))


@pytest.fixture(scope="module")
def engine(folder: Path, reference: Reference, recorder: str) -> Iterator[RemoteEngine]:
    spec = engine_spec(folder, gpu_memory_utilization=0.1, recorder=recorder)
    with running_engine(spec, gpu=True, blocks=BLOCKS, variables=EXACT) as engine:
        yield engine


@pytest.fixture(scope="module")
def open_engine(folder: Path, reference: Reference, recorder: str) -> Iterator[RemoteEngine]:
    spec = engine_spec(folder, gpu_memory_utilization=0.1, sampling=OPEN, recorder=recorder)
    with running_engine(spec, gpu=True, blocks=BLOCKS, variables=EXACT) as engine:
        yield engine


@pytest.fixture(scope="module")
def tolerance() -> Tolerance:
    return Tolerance(logp=1e-3, tie=1e-4, rare=1e-2)


def test_preempted_twice_and_resumed(
    engine: RemoteEngine, reference: Reference, tolerance: Tolerance, recorder: str
) -> None:
    """More sequences than the cache holds at once, long enough to be preempted again and again."""
    sampling = SamplingConfig(temperature=0.8, top_p=0.9, top_k=12, max_tokens=120)
    engine.watch()
    groups = engine.sample(prompts(8, shared=0, own=60, tag="y"), 4, sampling)
    check_groups(groups, reference, sampling, tolerance)
    watch = engine.watch()
    assert watch.preempted > 8, "hardly anything was preempted"
    assert (watch.fast_steps > 0) == (recorder == "packed")
    assert (watch.reused_steps > 0) == (recorder == "packed")


class TestRecorder(RecorderContract):
    pass
