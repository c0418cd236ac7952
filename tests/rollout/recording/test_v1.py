"""Compares the V1 recorder on a CPU to the float32 reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from keel.configs.schema import SamplingConfig
from tests.rollout.recording.contract import RecorderContract
from tests.rollout.recording.reference import Reference, Tolerance, check_groups
from tests.rollout.remote_engine import OPEN, RemoteEngine, engine_spec, prompts, running_engine
from tests.rollout.tiny_model import make_model

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(make_model(folder))


@pytest.fixture(scope="module")
def engine(folder: Path, reference: Reference) -> Iterator[RemoteEngine]:
    with running_engine(engine_spec(folder), gpu=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def tolerance() -> Tolerance:
    return Tolerance()


@pytest.fixture(scope="module")
def open_engine(engine: RemoteEngine) -> RemoteEngine:
    return engine


def test_truncated_and_open_requests_in_one_batch(
    engine: RemoteEngine, reference: Reference, tolerance: Tolerance
) -> None:
    sharp = SamplingConfig(temperature=0.7, top_k=5, max_tokens=16)
    asked = prompts(2, shared=0, own=9, tag="b")
    groups = engine.sample_items([(p, 2, s, True) for s in (OPEN, sharp) for p in asked])
    check_groups(groups[:2], reference, OPEN, tolerance)
    check_groups(groups[2:], reference, sharp, tolerance)


class TestV1Recorder(RecorderContract):
    way = "reads a loaded tensor"  # vLLM's loader handles packed weights


def test_engine_needs_the_expert_shim(folder: Path, reference: Reference) -> None:
    """Without the shim, the reload check at start-up must detect the bug."""
    with (
        pytest.raises(RuntimeError, match="prepack_experts"),
        running_engine(engine_spec(folder), gpu=False, without="prepack_experts"),
    ):
        pass
