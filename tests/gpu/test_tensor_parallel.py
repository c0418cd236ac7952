"""One engine on two GPUs: sampling, and turns between and during which weights change."""

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.marks import GPU
from tests.gpu.test_recorders_native import BLOCKS, EXACT
from tests.rollout.recording.contract import RecorderContract, Rig
from tests.rollout.recording.reference import Reference, Tolerance
from tests.rollout.remote_engine import engine_spec, running_engine
from tests.rollout.tiny_model import make_model

pytestmark = [*GPU, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("model")
    reference = Reference(make_model(folder))
    spec = engine_spec(folder, gpu_memory_utilization=0.1, tensor_parallel=2)
    with running_engine(spec, gpu=True, blocks=BLOCKS, variables=EXACT) as engine:
        yield Rig(engine, reference, Tolerance(logp=1e-3, tie=1e-4, rare=1e-2), engine)


class TestOnTwoGpus:
    test_truncated = RecorderContract.test_truncated_sampling
    test_turns = RecorderContract.test_turns_across_weight_updates
