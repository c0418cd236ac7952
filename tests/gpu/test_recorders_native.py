"""GPU recorders, sleep and weight updates by copies, against the float32 reference."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from keel.configs.schema import SamplingConfig
from tests.gpu.marks import GPU
from tests.rollout.recording.contract import RecorderContract, Rig
from tests.rollout.recording.reference import Reference, Tolerance, check_groups
from tests.rollout.remote_engine import OPEN, TRUNCATED, engine_spec, prompts, running_engine
from tests.rollout.tiny_model import checkpoint_tensors, make_model, perturbed
from tests.weights.updates import Model, check

pytestmark = GPU

EXACT = {"TRITON_F32_DEFAULT": "ieee"}
"""float32 products in Triton's kernels, where TF32 would turn routes."""
BLOCKS = 40
"""Of 16 tokens: a few sequences fill the cache, so that some are preempted."""


TOLERANCE = Tolerance(logp=1e-3, tie=1e-4, rare=1e-2)


@pytest.fixture(scope="module", params=["native", "packed"])
def recorder(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, recorder: str) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("model")
    reference = Reference(make_model(folder))
    options = {"gpu_memory_utilization": 0.1, "recorder": recorder}
    spec, open_spec = (engine_spec(folder, **options, **o) for o in ({}, {"sampling": OPEN}))
    with (
        running_engine(spec, gpu=True, blocks=BLOCKS, variables=EXACT) as engine,
        running_engine(open_spec, gpu=True, blocks=BLOCKS, variables=EXACT) as open_engine,
    ):
        yield Rig(engine, reference, TOLERANCE, open_engine)


def test_preempted_twice_and_resumed(rig: Rig, recorder: str) -> None:
    sampling = SamplingConfig(temperature=0.8, top_p=0.9, top_k=12, max_tokens=120)
    rig.engine.watch()
    rig.check(rig.engine.sample(prompts(8, shared=0, own=60, tag="y"), 4, sampling), sampling)
    watch = rig.engine.watch()
    assert watch.preempted > 8, "hardly anything was preempted"
    assert (watch.fast_steps > 0) == (recorder == "packed")
    assert (watch.reused_steps > 0) == (recorder == "packed")


def test_drafts_are_recorded_and_keep_the_distribution(tmp_path: Path) -> None:
    reference = Reference(make_model(tmp_path))
    options = {"gpu_memory_utilization": 0.1, "max_num_batched_tokens": 96}
    spec = engine_spec(tmp_path, draft_tokens=3, **options)
    sampling = SamplingConfig(temperature=0.5, top_p=0.95, top_k=3, max_tokens=150)
    asked = prompts(4, shared=0, own=60, tag="d")
    with running_engine(spec, gpu=True, blocks=1000, variables=EXACT) as engine:
        engine.watch()
        groups = engine.sample(asked, 4, sampling)
        steps = engine.watch().steps
    report = check_groups(groups, reference, sampling, TOLERANCE)
    longest = max(t.sampled_tokens for group in groups for t in group.trajectories)
    assert steps < 0.9 * longest, "hardly any draft was accepted"
    assert abs(report.surprise) < 4 * report.surprise_variance**0.5, report


class TestRecorder(RecorderContract):
    pass


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


@pytest.mark.parametrize(("of", "sleeps"), [("experts", True), ("dense", False)])
def test_updates_by_copies(tmp_path: Path, of: Model, sleeps: bool) -> None:
    check(tmp_path, of, sleeps=sleeps, shared=sleeps, gpu=True, variables=EXACT)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
class TestOnTwoGpus:
    test_truncated = RecorderContract.test_truncated_sampling
    test_turns = RecorderContract.test_turns_across_weight_updates

    @pytest.fixture(scope="class", params=[False, True], ids=["slices", "whole-experts"])
    def rig(
        self, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
    ) -> Iterator[Rig]:
        folder = tmp_path_factory.mktemp("model")
        reference = Reference(make_model(folder))
        options = {"tensor_parallel": 2, "expert_parallel": request.param}
        spec = engine_spec(folder, gpu_memory_utilization=0.1, **options)
        with running_engine(spec, gpu=True, blocks=BLOCKS, variables=EXACT) as engine:
            yield Rig(engine, reference, TOLERANCE, engine)
