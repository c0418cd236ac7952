"""Compares the recordings of the V1 recorder on a CPU to the float32 reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from keel.configs.schema import SamplingConfig
from tests.rollout.recording.contract import RecorderContract, Rig
from tests.rollout.recording.reference import Reference, Tolerance
from tests.rollout.remote_engine import OPEN, engine_spec, prompts, running_engine
from tests.rollout.tiny_model import make_model

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", params=["", "fast"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """An engine with either vLLM's scheduler or the packed recorder's scheduler."""
    folder = tmp_path_factory.mktemp("model")
    reference = Reference(make_model(folder))
    with running_engine(engine_spec(folder), gpu=False, kind=request.param) as engine:
        # vLLM's loader handles packed weights.
        yield Rig(engine, reference, Tolerance(), engine, way="reads a loaded tensor")


def test_truncated_and_open_requests_in_one_batch(rig: Rig) -> None:
    sharp = SamplingConfig(temperature=0.7, top_k=5, max_tokens=16)
    asked = prompts(2, shared=0, own=9, tag="b")
    groups = rig.engine.sample_items([(p, 2, s, True) for s in (OPEN, sharp) for p in asked])
    rig.check(groups[:2], OPEN)
    rig.check(groups[2:], sharp)


class TestV1Recorder(RecorderContract):
    pass
