"""Compares the recordings of the V1 recorder on a CPU to the float32 reference."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from keel.configs.schema import SamplingConfig
from tests.rollout.recording.contract import RecorderContract, Rig
from tests.rollout.recording.reference import Reference, Tolerance
from tests.rollout.remote_engine import OPEN, Kind, engine_spec, prompts, running_engine
from tests.rollout.tiny_model import make_model

pytestmark = pytest.mark.e2e


def running_rig(folder: Path, kind: Kind) -> Iterator[Rig]:
    reference = Reference(make_model(folder))
    with running_engine(engine_spec(folder), gpu=False, kind=kind) as engine:
        # vLLM's loader handles packed weights.
        yield Rig(engine, reference, Tolerance(), engine, way="reads a loaded tensor")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    yield from running_rig(tmp_path_factory.mktemp("model"), "")


def test_truncated_and_open_requests_in_one_batch(rig: Rig) -> None:
    sharp = SamplingConfig(temperature=0.7, top_k=5, max_tokens=16)
    asked = prompts(2, shared=0, own=9, tag="b")
    groups = rig.engine.sample_items([(p, 2, s, True) for s in (OPEN, sharp) for p in asked])
    rig.check(groups[:2], OPEN)
    rig.check(groups[2:], sharp)


class TestV1Recorder(RecorderContract):
    pass


class TestFastScheduler:
    """Runs the tests in which the packed recorder's scheduler does most."""

    @pytest.fixture(scope="class")
    def rig(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
        yield from running_rig(tmp_path_factory.mktemp("model"), "fast")

    test_preemption = RecorderContract.test_preemption
    test_cut = RecorderContract.test_deadline_cuts_while_preempted_or_waiting
    test_turns = RecorderContract.test_turns_across_weight_updates
    test_update = RecorderContract.test_weight_update_during_sampling
    test_cut_during_update = RecorderContract.test_deadline_cuts_during_a_weight_update
